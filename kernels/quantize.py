"""Quantized matrices: how they are rounded, stored, sliced and widened.

Letters: E experts, O output rows, I input columns, G scales of a row. The leading dimension E may
be missing.
"""

from collections.abc import Callable
from collections.abc import Sequence as Items
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor

from diffray.kernels.formats import Format

_TINY: Final = 1e-12  # smaller ranges count as this, so that no scale is 0
_SMALLEST: Final = 2.0**-24  # scales that are stored in float16
_STORED: Final = {
    "int8": torch.int8,
    "q8_0": torch.int8,
    "w8a8": torch.int8,
    "fp8": torch.float8_e4m3fn,
    "w8a8_fp8": torch.float8_e4m3fn,
}
_MIDDLE: Final = 8  # the stored value of 0 in int4, which is stored unsigned


@dataclass(frozen=True, slots=True, eq=False)
class Quantized:
    """A matrix, or one for each expert: `(values - zero) * scale`, with a scale per row or group.

    Weights of four bits are stored two to a byte, the even column in the low half. The bytes of
    w8a8 may be packed (`pack_bytes`); then only its product can read them. Blocks may be in tiles
    (kernels/cpu/blocks.py). q4_1 is `values * scale + zero` instead.
    """

    format: Format
    values_EOI: Tensor
    scale_EOG: Tensor
    zero_EOG: Tensor | None

    @classmethod
    def empty(cls, shape: Items[int], form: Format, device: torch.device | str) -> "Quantized":
        """Return an uninitialised matrix of this shape."""
        *rows, columns = shape
        width = columns // 2 if form.bits == 4 else columns
        scales = (*rows, form.scales_of(columns))
        half = torch.float16 if form.in_blocks else torch.float32
        zero = torch.float16 if form.has_minimum else torch.uint8
        has_zero = form.has_zero or form.has_minimum
        return cls(
            form,
            torch.empty((*rows, width), dtype=_STORED.get(form.kind, torch.uint8), device=device),
            torch.empty(scales, dtype=half, device=device),
            torch.empty(scales, dtype=zero, device=device) if has_zero else None,
        )

    @property
    def shape(self) -> tuple[int, ...]:
        if self.values_EOI.is_mkldnn:  # packed bytes have their columns first
            return tuple(reversed(self.values_EOI.shape))
        if self.is_tiled:
            tiles, blocks, lanes = self.scale_EOG.shape
            return tiles * lanes, blocks * self.format.group
        *rows, width = self.values_EOI.shape
        return (*rows, width * (2 if self.format.bits == 4 else 1))

    @property
    def is_tiled(self) -> bool:
        return self.values_EOI.dim() == 5

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self._tensors())

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, index: Any) -> "Quantized":
        """Return a view of some rows; `between` slices columns."""
        return self._each(lambda tensor: tensor[index])

    def split(self, sizes: list[int]) -> list["Quantized"]:
        """Return views of consecutive rows of these sizes."""
        starts = [sum(sizes[:number]) for number in range(len(sizes))]
        return [self[start : start + n] for start, n in zip(starts, sizes, strict=True)]

    def chunk(self, count: int, dim: int) -> list["Quantized"]:
        """Return views of equal parts along a dimension of rows."""
        part = self.values_EOI.shape[dim] // count
        before = (slice(None),) * dim
        return [self[*before, n * part : (n + 1) * part] for n in range(count)]

    def between(self, start: int, stop: int) -> "Quantized":
        """Return a view of the columns [start, stop): whole groups, and whole bytes."""
        fold, group = 2 if self.format.bits == 4 else 1, self.format.group
        scales = slice(start // group, stop // group) if group else slice(None)
        return Quantized(
            self.format,
            self.values_EOI[..., start // fold : stop // fold],
            self.scale_EOG[..., scales],
            None if self.zero_EOG is None else self.zero_EOG[..., scales],
        )

    def copy_(self, other: "Quantized") -> None:
        """Store another matrix of the same format in place."""
        assert self.format == other.format
        for mine, theirs in zip(self._tensors(), other._tensors(), strict=True):
            mine.copy_(theirs)

    def _tensors(self) -> list[Tensor]:
        kept = self.values_EOI, self.scale_EOG, self.zero_EOG
        return [tensor for tensor in kept if tensor is not None]

    def _each(self, change: Callable[[Tensor], Tensor]) -> "Quantized":
        assert not self.is_tiled, "its rows are in tiles"
        zero_EOG = None if self.zero_EOG is None else change(self.zero_EOG)
        values_EOI, scale_EOG = change(self.values_EOI), change(self.scale_EOG)
        return Quantized(self.format, values_EOI, scale_EOG, zero_EOG)


def quantize(w_EOI: Tensor, form: Format) -> Quantized:
    """Return the nearest matrix in this format; no weight moves by more than half a step.

    Zero points are integers and every range includes 0, as the common file formats require.
    """
    wide = w_EOI.float().unflatten(-1, (form.scales_of(w_EOI.shape[-1]), -1))
    zero: Tensor | None = None
    if form.has_minimum:
        zero = wide.amin(-1).half()
        wide = wide - zero.float().unsqueeze(-1)
        scale = wide.amax(-1).clamp(min=0) / form.largest
    elif form.has_zero:
        low, high = wide.amin(-1).clamp(max=0), wide.amax(-1).clamp(min=0)
        scale = (high - low).clamp(min=_TINY) / form.largest
        zero = (-low / scale).round().clamp(0, form.largest)
    else:
        scale = wide.abs().amax(-1).clamp(min=_TINY) / form.largest
    if form.in_blocks:
        scale = scale.clamp(min=_SMALLEST).half()
    steps = (wide / scale.unsqueeze(-1)).flatten(-2)
    if form.is_float8:
        stored = steps.clamp(-form.largest, form.largest).to(torch.float8_e4m3fn)
        return Quantized(form, stored, scale, None)
    whole = steps.round()
    if form.has_minimum:
        stored = whole.clamp_(0, form.largest).to(torch.uint8)
    elif zero is not None:
        whole = whole.unflatten(-1, (zero.shape[-1], -1)).add_(zero.unsqueeze(-1)).flatten(-2)
        stored = whole.clamp_(0, form.largest).to(torch.uint8)
        zero = zero.to(torch.uint8)
    elif form.bits == 4:
        stored = (whole.clamp_(-8, 7) + _MIDDLE).to(torch.uint8)
    else:
        stored = whole.clamp_(-127, 127).to(torch.int8)
    return Quantized(form, pack_nibbles(stored) if form.bits == 4 else stored, scale, zero)


def dequantize(kept: Quantized, dtype: torch.dtype) -> Tensor:
    """Return the matrix [E, O, I] in a floating dtype; computed in float32 at least."""
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    form, scale = kept.format, kept.scale_EOG.to(wide)
    found = numbers(kept).to(wide).unflatten(-1, (scale.shape[-1], -1))
    zero = None if kept.zero_EOG is None else kept.zero_EOG.to(wide).unsqueeze(-1)
    if zero is not None and form.has_zero:
        found.sub_(zero)
    elif zero is None and form.bits == 4:
        found.sub_(_MIDDLE)
    found.mul_(scale.unsqueeze(-1))
    if zero is not None and form.has_minimum:
        found.add_(zero)
    widened: Tensor = found.flatten(-2)
    return widened.to(dtype)


def numbers(kept: Quantized) -> Tensor:
    """Return the stored numbers, one per element."""
    values = kept.values_EOI
    if kept.format.bits == 4:
        return unpack_nibbles(values)
    return _readable(values) if kept.format.is_float8 else values


def _readable(values: Tensor) -> Tensor:
    """Return float8 numbers in a dtype that is fast to convert."""
    if not values.is_cpu:
        return values
    # On a CPU torch converts float8 numbers one by one, six times as slow. The same bits, moved to
    # their places in a float16, are the number divided by 2**8.
    bits = values.view(torch.int8).to(torch.int16)
    moved = ((bits & 0x7F) << 7).bitwise_or_(bits.bitwise_and(-(1 << 15)))
    halves: Tensor = moved.view(torch.float16)
    return halves.float().mul_(256.0)


def pack_nibbles(values: Tensor) -> Tensor:
    """Pack numbers from 0 to 15 two to a byte."""
    return values[..., 0::2] | (values[..., 1::2] << 4)


def unpack_nibbles(packed: Tensor) -> Tensor:
    """Return the numbers from 0 to 15 that are packed two to a byte."""
    pair = packed.to(torch.int16)
    pair = (pair << 4).bitwise_or_(pair).bitwise_and_(0x0F0F)
    return pair.view(torch.uint8)


def float8_rows(x_TI: Tensor) -> tuple[Tensor, Tensor]:
    """Return activations in float8 and the scale of each row [T, 1], in float32.

    A scale is the smallest power of 2 with which the row fits. So dividing and multiplying by it
    are exact, every device rounds alike, and a float8 number times its scale is a bfloat16 number.
    """
    largest_T1 = x_TI.abs().amax(-1, keepdim=True).float().clamp(min=_TINY)
    # 448 is 1.75 * 2**8: a larger significand needs the next power.
    bits_T1 = (largest_T1.view(torch.int32) + 0x1FFFFF) & ~0x7FFFFF
    scale_T1 = bits_T1.view(torch.float32) * 2.0**-8
    wide = x_TI if x_TI.dtype == torch.float64 else x_TI.float()
    return (wide / scale_T1).to(torch.float8_e4m3fn), scale_T1


def round_rows(x_TI: Tensor) -> Tensor:
    """Return activations rounded by `float8_rows`, in their own dtype."""
    rounded_TI, scale_T1 = float8_rows(x_TI)
    wide = torch.float64 if x_TI.dtype == torch.float64 else torch.float32
    found: Tensor = _readable(rounded_TI).to(wide).mul_(scale_T1)
    return found.to(x_TI.dtype)


def quantize_rows(x_TI: Tensor) -> tuple[Tensor, Tensor]:
    """Return activations in int8 and the scale of each row [T, 1], in float32 at least."""
    wide = x_TI if x_TI.dtype == torch.float64 else x_TI.float()
    scale_T1 = wide.abs().amax(-1, keepdim=True).clamp(min=_TINY) / 127.0
    return (wide / scale_T1).round_().to(torch.int8), scale_T1
