"""The folder that shows a GGUF file as a checkpoint: config.json, tokenizer and a link."""

import atexit
import hashlib
import json
import math
import os
import shutil
import struct
import tempfile
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any, Final

from diffray.components.checkpoints.folder import DRAFTER, CheckpointError
from diffray.components.checkpoints.gguf import ROPE_FACTORS, Gguf, read_gguf
from diffray.components.checkpoints.gguf_tokenizer import tokenizer_files
from diffray.components.models.fields import shown
from diffray.kernels.user_cache import cache_folder

LINK: Final = "weights.gguf"
_EDITION: Final = 2  # of what is written; folders of other editions are not used
_ARCHITECTURES: Final = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "dream": "DreamModel",
    "llada": "LLaDAModelLM",
    "llada-moe": "LLaDAMoEModelLM",
}
_HEADS: Final = "attention.head_count"
_KEYS: Final = {  # in config.json, and in LLaDA's
    "block_count": ("num_hidden_layers", "n_layers"),
    "embedding_length": ("hidden_size", "d_model"),
    _HEADS: ("num_attention_heads", "n_heads"),
    "attention.head_count_kv": ("num_key_value_heads", "n_kv_heads"),
    "feed_forward_length": ("intermediate_size", "mlp_hidden_size"),
    "context_length": ("max_position_embeddings", "max_sequence_length"),
    "attention.layer_norm_rms_epsilon": ("rms_norm_eps", "rms_norm_eps"),
    "rope.freq_base": ("rope_theta", "rope_theta"),
}
_EXPERT_KEYS: Final = {
    "expert_count": ("num_experts",),
    "expert_used_count": ("num_experts_per_tok",),
    "expert_feed_forward_length": ("expert_intermediate_size",),
}
# Fields that repeat others, or say what these families always do.
_REPEATED: Final = (
    *("vocab_size", "attention.causal", "attention.key_length", "attention.value_length"),
    *("rope.scaling.original_context_length", "expert_weights_norm"),
)
_LLADA: Final = {
    **{"activation_type": "silu", "block_type": "llama", "layer_norm_type": "rms"},
    **{"rope": True, "include_bias": False},
}


def config_of(gguf: Gguf) -> dict[str, Any]:
    """Return the fields as config.json; refuse those that need other arithmetic."""
    name = gguf.architecture
    if name not in _ARCHITECTURES:
        raise CheckpointError(
            f"{gguf.path} has the architecture {shown(gguf.fields.get('general.architecture'))}; "
            f"supported are {', '.join(_ARCHITECTURES)}: use the original checkpoint"
        )
    is_llada, is_sparse = name == "llada", name == "llada-moe"
    keys = _KEYS | (_EXPERT_KEYS if is_sparse else {})
    given = {key: gguf.own(key) for key in keys}
    given["attention.head_count_kv"] = given["attention.head_count_kv"] or given[_HEADS]
    given["rope.freq_base"] = given["rope.freq_base"] or 10000.0  # converters leave out a default
    lacking = [f"{name}.{key}" for key, value in given.items() if value is None]
    lacking += {"token_embd.weight"} - gguf.tensors.keys()
    if lacking:
        raise CheckpointError(f"{gguf.path} lacks {lacking[0]}; download it again")
    config = {keys[key][is_llada]: value for key, value in given.items()}
    config |= {
        "architectures": [_ARCHITECTURES[name]],
        "head_dim": gguf.own("attention.key_length") or gguf.own("rope.dimension_count"),
        "vocab_size": gguf.tensors["token_embd.weight"].shape[0],
        ("tie_word_embeddings", "weight_tying")[is_llada]: "output.weight" not in gguf.tensors,
        "mask_token_id": gguf.fields.get("tokenizer.ggml.mask_token_id"),
    }
    _refuse_unread(gguf, {*keys, *_REPEATED}, config["head_dim"])
    if ROPE_FACTORS in gguf.tensors:
        config["rope_scaling"] = _llama3_scaling(gguf)
    if is_sparse:
        config["dense_intermediate_size"] = given["feed_forward_length"]
        config["qk_layernorm"] = "blk.0.attn_q_norm.weight" in gguf.tensors
    return config | (_LLADA if is_llada else {})


def _llama3_scaling(gguf: Gguf) -> dict[str, Any]:
    """Return the scaling of Llama 3.1 and later, of which the file has only the result."""
    place, theta = gguf.tensors[ROPE_FACTORS], gguf.own("rope.freq_base")
    with gguf.path.open("rb") as file:
        file.seek(place.start)
        found = struct.unpack("<64f", file.read(256).ljust(256))[: place.shape[-1]]
    factor = float(max(found))
    known = place.kind == "F32" and isinstance(theta, float) and theta > 1 and factor >= 1
    for at, one in enumerate(found if known else ()):
        turns = 8192 * theta ** (-at / len(found)) / (2 * math.pi)
        share = min(max((turns - 1) / (4 - 1), 0.0), 1.0)
        known &= math.isclose(one * ((1 - share) / factor + share), 1, rel_tol=1e-4)
    if not known:
        raise CheckpointError(
            f"{gguf.path}: {ROPE_FACTORS} is not as Llama 3 scales angles; use the original "
            "checkpoint"
        )
    turning = {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
    trained = {"original_max_position_embeddings": 8192}
    return {"rope_type": "llama3", "factor": factor} | turning | trained


def _refuse_unread(gguf: Gguf, read: set[str], head_dim: object) -> None:
    """Refuse fields that may change the mathematics."""
    name = gguf.architecture
    only = {
        f"{name}.rope.dimension_count": head_dim,
        f"{name}.expert_gating_func": 1,  # softmax
        "diffusion.shift_logits": name == "dream",
        "split.count": 1,
    }
    for key, value in gguf.fields.items():
        is_other = key.startswith(f"{name}.") and key.removeprefix(f"{name}.") not in read
        is_wrong = value != only[key] if key in only else is_other and value not in (0, "none")
        if is_wrong:
            raise CheckpointError(
                f"{gguf.path}: {shown(key)} is {shown(value)}, which is not implemented for GGUF; "
                "use the original checkpoint"
            )


def gguf_folder(path: Path, drafter: Path | None = None) -> Path:
    """Return the folder that shows the file as a checkpoint; write it if it is not there.

    With a drafter, the folder links that too.
    """
    real = path.resolve()
    links = {LINK: real} | ({} if drafter is None else {DRAFTER: drafter.resolve()})
    stat = real.stat()
    said = os.fsencode(f"{[*links.values()]}\0{stat.st_size}\0{stat.st_mtime_ns}\0{_EDITION}")
    name = f"{real.stem[:60]}-{hashlib.sha256(said).hexdigest()[:16]}"
    folder = cache_folder("gguf") / name
    with suppress(OSError):  # it may belong to another user
        if (folder / "config.json").is_file():
            return folder
    gguf = read_gguf(real, texts=True)
    files = {"config.json": json.dumps(config_of(gguf))} | tokenizer_files(real, gguf.fields)
    try:
        return _written(folder, files, links)
    except OSError:
        return _written(_temporary() / name, files, links)


@cache
def _temporary() -> Path:
    """Return a folder of this process, for when the user's cache cannot be written."""
    made = tempfile.mkdtemp(prefix="diffray-gguf-")
    atexit.register(shutil.rmtree, made, ignore_errors=True)
    return Path(made)


def _written(folder: Path, files: dict[str, str], links: dict[str, Path]) -> Path:
    folder.parent.mkdir(parents=True, exist_ok=True)
    work = Path(tempfile.mkdtemp(prefix=".", dir=folder.parent))
    try:
        for name, text in files.items():
            (work / name).write_text(text, encoding="utf-8")
        for name, real in links.items():
            (work / name).symlink_to(real)
        work.chmod(0o755)
        work.rename(folder)
    except OSError:
        if not (folder / "config.json").is_file():  # another process was faster
            raise
    finally:
        shutil.rmtree(work, ignore_errors=True)
    return folder
