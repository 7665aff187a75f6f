"""The header of a GGUF file, read with limits, as its counts can be anything; without torch."""

import math
import struct
from pathlib import Path
from typing import Any, BinaryIO, Final, NamedTuple

from diffray.components.checkpoints.folder import CheckpointError, reason_of
from diffray.components.models.fields import shown

ROPE_FACTORS: Final = "rope_freqs.weight"
_SUPPORTED: Final = {  # by number: name, weights of a block, bytes of a block
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
_PERMUTED: Final = ("llama", "llada")  # where llama.cpp's converter reorders rows


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
    if number not in _SUPPORTED:
        kind = _TYPES[number] if number < len(_TYPES) else f"type {number}"
        supported = ", ".join(kind for kind, *_ in _SUPPORTED.values())
        raise CheckpointError(
            f"{path} stores {shown(name)} as {kind}; supported are {supported}: make such a file "
            "with llama-quantize --pure, or use the original checkpoint"
        )
    kind, block, num_bytes = _SUPPORTED[number]
    if min(shape) < 1 or shape[-1] % block:
        raise ValueError(f"{shown(name)} is {list(shape)} in {kind}")
    row_bytes = shape[-1] // block * num_bytes
    if begin + offset + math.prod(shape[:-1]) * row_bytes > size:
        raise ValueError(f"{shown(name)} ends after the file")
    return Place(shape, kind, row_bytes, begin + offset)
