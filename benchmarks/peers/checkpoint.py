"""Checkpoints that a peer can load: LLaDA's whole vocabulary, and remote code beside the weights.

dlmserve and dfastllm have LLaDA's mask id built in, so their checkpoint needs its 126464 ids. Every
ordinary id is a word of its own, so that an answer's text tells its tokens.
"""

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from benchmarks.random_checkpoint import Shape, write
from diffray.components.checkpoints.checkpoint import resolve

VOCAB, ORDINARY = 126464, 126080
END_ID, MASK_ID = 126081, 126336
SPECIAL = {END_ID: "<|endoftext|>", MASK_ID: "<|mdm_mask|>"}
HEAD_DIM = 64
CHAT_TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"

LLADA_CODE = ("configuration_llada.py", "modeling_llada.py")
LLADA_MAP = {
    "AutoConfig": "configuration_llada.LLaDAConfig",
    "AutoModel": "modeling_llada.LLaDAModelLM",
    "AutoModelForCausalLM": "modeling_llada.LLaDAModelLM",
}
LLADA2_CODE = ("configuration_llada2_moe.py", "modeling_llada2_moe.py")
LLADA2_MAP = {
    "AutoConfig": "configuration_llada2_moe.LLaDA2MoeConfig",
    "AutoModelForCausalLM": "modeling_llada2_moe.LLaDA2MoeModelLM",
}


def code_folder(checkout: Path, files: tuple[str, ...]) -> Path:
    """Return where in a checkout these files are: there may be copies, the topmost counts."""
    found = sorted(checkout.rglob(files[0]), key=lambda path: (len(path.parts), path))
    for path in found:
        if all((path.parent / name).is_file() for name in files):
            return path.parent
    raise ValueError(f"{checkout} has no {' with '.join(files)}; give a checkout that has them")


def add_code(folder: Path, code: Path, files: tuple[str, ...], auto_map: dict[str, str]) -> None:
    """Copy remote code beside the weights, and tell of it in config.json."""
    for name in files:
        shutil.copyfile(code / name, folder / name)
    update_config(folder, auto_map=auto_map)


def update_config(folder: Path, **fields: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields, indent=1) + "\n")


def write_llada(folder: Path, code: Path, *, layers: int, hidden: int, seed: int) -> int:
    """Write a random LLaDA with its own vocabulary; returns the number of parameters.

    The weights are in bfloat16, because dlmserve reads no float32; widened, they are the same for
    all. The rows of special ids are 0 in the head, so that they are never the best and every answer
    has its full length.
    """
    heads = hidden // HEAD_DIM
    if hidden % HEAD_DIM or not heads:
        raise ValueError(f"--hidden {hidden} is no multiple of {HEAD_DIM}, the size of a head")
    shape = Shape(hidden, layers, heads, kv_heads=heads, mlp=hidden * 14 // 5, vocab=VOCAB)
    count = write(folder, "llada", shape, seed=seed, dtype=torch.bfloat16, head_gain=12.0)
    weights = load_file(folder / "model.safetensors")
    weights["model.transformer.ff_out.weight"][ORDINARY:] = 0
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    update_config(folder, mask_token_id=MASK_ID, eos_token_id=END_ID, pad_token_id=END_ID)
    add_code(folder, code, LLADA_CODE, LLADA_MAP)
    write_tokenizer(folder)
    return count


def word(token: int) -> str:
    return SPECIAL.get(token, f"w{token}" if token < ORDINARY else f"<|reserved_{token}|>")


def write_tokenizer(folder: Path) -> None:
    """Write a tokenizer whose words are the ids' numbers."""
    vocabulary = {word(token): token for token in range(VOCAB)}
    added = [
        {
            "id": token,
            "content": text,
            "special": True,
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
        }
        for token, text in SPECIAL.items()
    ]
    tokenizer = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added,
        "normalizer": None,
        "pre_tokenizer": {"type": "WhitespaceSplit"},
        "post_processor": None,
        "decoder": None,
        "model": {"type": "WordLevel", "vocab": vocabulary, "unk_token": word(0)},
    }
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": SPECIAL[END_ID],
        "pad_token": SPECIAL[END_ID],
        "chat_template": CHAT_TEMPLATE,
        "clean_up_tokenization_spaces": False,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=1) + "\n")


def copy_llada2(name: str, folder: Path, code: Path) -> None:
    """Copy a LLaDA2 checkpoint, a folder or a demo's name, and put remote code beside it."""
    shutil.copytree(resolve(name), folder, dirs_exist_ok=True)
    add_code(folder, code, LLADA2_CODE, LLADA2_MAP)
