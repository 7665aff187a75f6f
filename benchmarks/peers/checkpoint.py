"""Checkpoints that a peer can load: LLaDA's whole vocabulary, and remote code beside the weights.

dlmserve and dfastllm have LLaDA's mask id built in, so their checkpoint needs its 126464 ids. Every
ordinary id is a word of its own, so that an answer's text shows its tokens.
"""

import json
import shutil
from pathlib import Path

import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit

from benchmarks.random_checkpoint import Shape, config_of, write
from diffray.components.checkpoints.folder import resolve

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
    """Return the topmost folder of a checkout that has these files."""
    found = sorted(checkout.rglob(files[0]), key=lambda path: (len(path.parts), path))
    for path in found:
        if all((path.parent / name).is_file() for name in files):
            return path.parent
    raise ValueError(f"{checkout} has no {' with '.join(files)}; give a checkout that has them")


def write_llada(folder: Path, code: Path, *, layers: int, hidden: int, seed: int) -> None:
    """Write a random LLaDA with its own vocabulary.

    The weights are in bfloat16, because dlmserve cannot read float32; widened, they are the same in
    all systems. Special ids are never the best, so every answer has its full length.
    """
    heads = hidden // HEAD_DIM
    shape = Shape(hidden, layers, heads, kv_heads=heads, mlp=hidden * 14 // 5, vocab=VOCAB)
    ids = {"mask_token_id": MASK_ID, "eos_token_id": END_ID, "pad_token_id": END_ID}
    config = config_of("llada", shape) | ids | {"auto_map": LLADA_MAP}
    special = slice(ORDINARY, VOCAB)
    write(folder, config, seed=seed, dtype=torch.bfloat16, never=special)
    copy_code(folder, code, LLADA_CODE)
    write_tokenizer(folder)


def copy_llada2(name: str, folder: Path, code: Path) -> None:
    """Copy a LLaDA2 checkpoint, a folder or a demo's name, and put remote code beside it."""
    shutil.copytree(resolve(name), folder, dirs_exist_ok=True)
    copy_code(folder, code, LLADA2_CODE)
    config = json.loads((folder / "config.json").read_text()) | {"auto_map": LLADA2_MAP}
    (folder / "config.json").write_text(json.dumps(config, indent=1) + "\n")


def copy_code(folder: Path, code: Path, files: tuple[str, ...]) -> None:
    for name in files:
        shutil.copyfile(code / name, folder / name)


def word(token: int) -> str:
    return SPECIAL.get(token, f"w{token}" if token < ORDINARY else f"<|reserved_{token}|>")


def write_tokenizer(folder: Path) -> None:
    """Write a tokenizer whose words are numbered by their ids."""
    vocabulary = {word(token): token for token in range(VOCAB)}
    tokenizer = Tokenizer(WordLevel(vocabulary, unk_token=word(0)))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    tokenizer.add_special_tokens(list(SPECIAL.values()))
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {  # written by hand, because peers run another version of transformers
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": SPECIAL[END_ID],
        "pad_token": SPECIAL[END_ID],
        "chat_template": CHAT_TEMPLATE,
        "clean_up_tokenization_spaces": False,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=1) + "\n")
