"""GGUF files: their header, and the folder that shows one as a checkpoint; without torch.

The header is read with limits, as its counts can be anything.
"""

import atexit
import hashlib
import json
import math
import os
import shutil
import struct
import tempfile
from functools import cache
from pathlib import Path
from typing import Any, BinaryIO, Final, NamedTuple

from diffray import __version__
from diffray.components.checkpoints.folder import CheckpointError, reason_of
from diffray.components.checkpoints.gguf_tokenizer import tokenizer_files
from diffray.components.models.fields import Config, shown

ROPE: Final = "rope_freqs.weight"
LINK: Final = "weights.gguf"  # in the folder, to the file
SUPPORTED: Final = {  # by number: name, weights of a block, bytes of a block
    0: ("F32", 1, 4),
    1: ("F16", 1, 2),
    30: ("BF16", 1, 2),
    8: ("Q8_0", 32, 34),
    2: ("Q4_0", 32, 18),
    3: ("Q4_1", 32, 20),
}
_TYPES: Final = (
    "F32 F16 Q4_0 Q4_1 - - Q5_0 Q5_1 Q8_0 Q8_1 Q2_K Q3_K Q4_K Q5_K Q6_K Q8_K IQ2_XXS IQ2_XS "
    "IQ3_XXS IQ1_S IQ4_NL IQ3_S IQ2_S IQ4_XS I8 I16 I32 I64 F64 IQ1_M BF16 - - - TQ1_0 TQ2_0 "
    "- - - MXFP4 NVFP4"
).split()
_SCALARS: Final = dict(zip((0, 1, 2, 3, 4, 5, 6, 7, 10, 11, 12), "BbHhIif?Qqd", strict=True))
_STRING, _ARRAY = 8, 9
_MOST_ITEMS: Final = 2**22  # fields, tensors and items of arrays, in all
_LARGEST: Final = 2**28  # bytes of a header
_ARCHITECTURES: Final = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "dream": "DreamModel",
    "llada": "LLaDAModelLM",
    "llada-moe": "LLaDAMoEModelLM",
}
_PERMUTED: Final = ("llama", "llada")
_KEYS: Final = {
    "num_hidden_layers": "block_count",
    "hidden_size": "embedding_length",
    "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
    "intermediate_size": "feed_forward_length",
    "max_position_embeddings": "context_length",
    "rms_norm_eps": "attention.layer_norm_rms_epsilon",
    "rope_theta": "rope.freq_base",
}
_EXPERT_KEYS: Final = {
    "num_experts": "expert_count",
    "num_experts_per_tok": "expert_used_count",
    "expert_intermediate_size": "expert_feed_forward_length",
}
_LLADA: Final = {
    "num_hidden_layers": "n_layers",
    "hidden_size": "d_model",
    "num_attention_heads": "n_heads",
    "num_key_value_heads": "n_kv_heads",
    "intermediate_size": "mlp_hidden_size",
    "max_position_embeddings": "max_sequence_length",
    "tie_word_embeddings": "weight_tying",
}
# Fields that repeat others, or say what these families always do.
_REPEATED: Final = (
    *("vocab_size", "attention.causal", "attention.key_length", "attention.value_length"),
    *("rope.scaling.original_context_length", "expert_weights_norm"),
)


class Place(NamedTuple):
    """A tensor, and where its first row is in the file."""

    shape: tuple[int, ...]
    kind: str
    row_bytes: int
    start: int


class Gguf(NamedTuple):
    """A file's header."""

    path: Path
    fields: dict[str, Any]
    tensors: dict[str, Place]

    @property
    def architecture(self) -> str:
        return str(self.fields.get("general.architecture"))

    def own(self, key: str) -> Any:
        """Return a field of the architecture, or None."""
        return self.fields.get(f"{self.architecture}.{key}")

    def head_rows(self, name: str) -> int:
        """Return the rows of a head if the tensor's are permuted, else 0."""
        heads = {"attn_q": "attention.head_count", "attn_k": "attention.head_count_kv"}
        key = heads.get(name.split(".")[-2]) if self.architecture in _PERMUTED else None
        count = self.own(key) or self.own("attention.head_count") if key else None
        return int(self.tensors[name].shape[0] // count) if count else 0


class _Stream:
    """The values of a header, one after the other; refuses more than the file can hold."""

    def __init__(self, file: BinaryIO, size: int, keep: bool) -> None:
        self._file, self.size, self.at, self._items, self._keep = file, size, 0, 0, keep

    def take(self, count: int) -> bytes:
        self.at += count
        if self.at > min(self.size, _LARGEST):
            raise ValueError("the header does not end")
        return self._file.read(count)

    def numbers(self, code: str) -> tuple[Any, ...]:
        return struct.unpack(f"<{code}", self.take(struct.calcsize(f"<{code}")))

    def text(self) -> str:
        return self.take(self.numbers("Q")[0]).decode()

    def count(self, number: int) -> int:
        self._items += number
        if self._items > _MOST_ITEMS:
            raise ValueError("it counts more than a model has")
        return number

    def value(self) -> Any:
        """Return a field's value; of a float32 the decimal that it was made from, as 1e-5."""
        kind = self.numbers("I")[0]
        if kind == _STRING:
            return self.text()
        if kind != _ARRAY:
            found = self.numbers(_scalar(kind))[0]
            return float(f"{found:.7g}") if kind == 6 else found
        kind, number = self.numbers("IQ")
        self.count(number)
        if kind == _STRING and self._keep:
            return [self.text() for _ in range(number)]
        if kind == _STRING:
            for _ in range(number):
                self.take(self.numbers("Q")[0])
            return None
        return [*self.numbers(f"{number}{_scalar(kind)}")]


def _scalar(kind: int) -> str:
    if kind not in _SCALARS:
        raise ValueError(f"a field is of type {kind}")
    return _SCALARS[kind]


def read_gguf(path: Path, *, texts: bool = False) -> Gguf:
    """Read a file's header; refuse a file that is broken or holds other types of tensors.

    Without `texts`, lists of texts are None: a tokenizer's take tens of megabytes.
    """
    try:
        with path.open("rb") as file:
            return _read(path, _Stream(file, path.stat().st_size, texts))
    except CheckpointError:
        raise
    except (OSError, ValueError, struct.error) as error:
        raise CheckpointError(
            f"{path} is truncated or not a GGUF file ({reason_of(error)}); download it again"
        ) from error


def _read(path: Path, stream: _Stream) -> Gguf:
    magic, version = stream.take(4), stream.numbers("I")[0]
    if magic != b"GGUF":
        raise ValueError("it does not begin with GGUF")
    if version not in (2, 3):
        which = f"version {version}" if version < 2**16 else "a big-endian version"
        raise CheckpointError(
            f"{path} is GGUF of {which}; supported are versions 2 and 3, little-endian: convert "
            "the original checkpoint again"
        )
    num_tensors, num_fields = stream.numbers("QQ")
    fields = {}
    for _ in range(stream.count(num_fields)):
        name = stream.text()
        if name in fields:
            raise ValueError(f"{shown(name)} occurs twice")
        fields[name] = stream.value()
    found: dict[str, tuple[Any, ...]] = {}
    for _ in range(stream.count(num_tensors)):
        name, dims = stream.text(), stream.numbers("I")[0]
        if name in found or not 1 <= dims <= 3:
            raise ValueError(f"{shown(name)} occurs twice or has {dims} dimensions")
        found[name] = stream.numbers(f"{dims}QIQ")
    step = fields.get("general.alignment", 32)
    if not isinstance(step, int) or step < 8 or step & (step - 1):
        raise ValueError(f"general.alignment is {shown(step)}")
    begin = -(-stream.at // step) * step
    tensors = {name: _tensor(path, name, *found[name], begin, stream.size) for name in found}
    return Gguf(path, fields, tensors)


def _tensor(path: Path, name: str, *described: int) -> Place:
    *dims, number, offset, begin, size = described
    shape = tuple(reversed(dims))
    if number not in SUPPORTED:
        kind = _TYPES[number] if number < len(_TYPES) else f"type {number}"
        supported = ", ".join(kind for kind, *_ in SUPPORTED.values())
        raise CheckpointError(
            f"{path} stores {shown(name)} as {kind}; supported are {supported}: make such a file "
            "with llama-quantize --pure, or use the original checkpoint"
        )
    kind, block, num_bytes = SUPPORTED[number]
    if min(shape) < 1 or shape[-1] % block:
        raise ValueError(f"{shown(name)} is {list(shape)} in {kind}")
    row_bytes = shape[-1] // block * num_bytes
    if begin + offset + math.prod(shape[:-1]) * row_bytes > size:
        raise ValueError(f"{shown(name)} ends after the file")
    return Place(shape, kind, row_bytes, begin + offset)


def config_of(gguf: Gguf) -> Config:
    """Return the fields as config.json; refuse those that need other arithmetic."""
    name = gguf.architecture
    if name not in _ARCHITECTURES:
        raise CheckpointError(
            f"{gguf.path} has the architecture {shown(gguf.fields.get('general.architecture'))}; "
            f"supported are {', '.join(_ARCHITECTURES)}: use the original checkpoint"
        )
    is_sparse = name == "llada-moe"
    keys = _KEYS | (_EXPERT_KEYS if is_sparse else {})
    config = {ours: gguf.own(theirs) for ours, theirs in keys.items()}
    config["num_key_value_heads"] = config["num_key_value_heads"] or config["num_attention_heads"]
    if lacking := [keys[ours] for ours, value in config.items() if value is None]:
        raise CheckpointError(f"{gguf.path} lacks {name}.{lacking[0]}; download it again")
    if "token_embd.weight" not in gguf.tensors:
        raise CheckpointError(f"{gguf.path} lacks token_embd.weight; download it again")
    config |= {
        "architectures": [_ARCHITECTURES[name]],
        "head_dim": gguf.own("attention.key_length") or gguf.own("rope.dimension_count"),
        "vocab_size": gguf.tensors["token_embd.weight"].shape[0],
        "tie_word_embeddings": "output.weight" not in gguf.tensors,
        "mask_token_id": gguf.fields.get("tokenizer.ggml.mask_token_id"),
    }
    if ROPE in gguf.tensors:
        config["rope_scaling"] = _llama3_scaling(gguf)
    _refuse_unread(gguf, {*keys.values(), *_REPEATED}, config["head_dim"])
    if is_sparse:
        config["dense_intermediate_size"] = config["intermediate_size"]
        config["qk_layernorm"] = "blk.0.attn_q_norm.weight" in gguf.tensors
    if name == "llada":
        config = {_LLADA.get(key, key): value for key, value in config.items()}
        config |= {"activation_type": "silu", "block_type": "llama", "layer_norm_type": "rms"}
        config |= {"rope": True, "include_bias": False}
    return config


def _llama3_scaling(gguf: Gguf) -> Config:
    """Return the scaling of Llama 3.1 and later, of which the file has only the result."""
    place, theta = gguf.tensors[ROPE], gguf.own("rope.freq_base")
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
            f"{gguf.path}: {ROPE} is not as Llama 3 scales angles; use the original checkpoint"
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


def gguf_folder(path: Path) -> Path:
    """Return the folder that shows the file as a checkpoint; write it if it is not there."""
    real = path.resolve()
    stat = real.stat()
    said = os.fsencode(f"{real}\0{stat.st_size}\0{stat.st_mtime_ns}\0{__version__}")
    name = f"{real.stem[:60]}-{hashlib.sha256(said).hexdigest()[:16]}"
    cache_home = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    folder = Path(cache_home) / "diffray" / "gguf" / name
    if (folder / "config.json").is_file():
        return folder
    gguf = read_gguf(real, texts=True)
    files = {"config.json": json.dumps(config_of(gguf))} | tokenizer_files(real, gguf.fields)
    try:
        return _written(folder, files, real)
    except OSError:
        return _written(_temporary() / name, files, real)


@cache
def _temporary() -> Path:
    """Return a folder of this process, for when the user's cache cannot be written."""
    made = tempfile.mkdtemp(prefix="diffray-gguf-")
    atexit.register(shutil.rmtree, made, ignore_errors=True)
    return Path(made)


def _written(folder: Path, files: dict[str, str], real: Path) -> Path:
    folder.parent.mkdir(parents=True, exist_ok=True)
    work = Path(tempfile.mkdtemp(prefix=".", dir=folder.parent))
    try:
        for name, text in files.items():
            (work / name).write_text(text, encoding="utf-8")
        (work / LINK).symlink_to(real)
        work.rename(folder)
    except OSError:
        if not (folder / "config.json").is_file():  # another process was faster
            raise
    finally:
        shutil.rmtree(work, ignore_errors=True)
    return folder
