"""Attention over quantized K/V in Triton: heads are rounded into their pages, and read from there.

Letters: T packed tokens, N heads of any kind, G key heads, D head size, R rows (token, head).
"""

import math
from collections.abc import Sequence as Items
from typing import Any, Final

import torch
import triton
import triton.language as tl
from torch import Tensor

from diffray.kernels import quantized_kv
from diffray.kernels.attention import QKRotary
from diffray.kernels.kernel import Kernel
from diffray.kernels.numeric_errors import largest_error
from diffray.kernels.quantized_kv import QuantizedKV, Rounded, widen_heads
from diffray.kernels.triton.attention import SPLIT_KEYS, InBits, paged_attention
from diffray.kernels.triton.launch import overlapped, wait_for_previous
from diffray.kernels.triton.rope import rotate_and_store
from diffray.kernels.windows import Windows

_NUMBERS = 2048  # that one program rounds
_WIDE: Final = torch.float32
_MOST_DIFFERENT: Final = 1e-2  # share of numbers that may be rounded the other way


def quantized_attend(
    heads_TND: Tensor,
    rotary: QKRotary,
    kv: QuantizedKV,
    slots_T: Tensor,
    windows: Windows,
    *,
    split_keys: int = SPLIT_KEYS,
    pdl: bool = False,
) -> Tensor:
    """Norm and rotate heads, round and store keys and values, return the attention output."""
    num_tokens, _, size = heads_TND.shape
    own_2TGD = heads_TND.new_empty(2, num_tokens, kv.keys.numbers_NB.shape[1], size)
    places_T = torch.arange(num_tokens, device=slots_T.device)
    q_TQD = rotate_and_store(heads_TND, rotary, own_2TGD[0], own_2TGD[1], places_T, pdl=pdl)
    round_and_store(own_2TGD, kv, slots_T, pdl=pdl)
    in_bits = InBits(kv.form.bits, kv.keys.pairs_NP2, kv.values.pairs_NP2, own_2TGD)
    pools = kv.keys.numbers_NB, kv.values.numbers_NB
    return paged_attention(
        q_TQD, *pools, windows.paged, split_keys=split_keys, pdl=pdl, in_bits=in_bits
    )


def round_and_store(
    heads_2TGD: Tensor, kv: QuantizedKV, slots_T: Tensor, *, pdl: bool = False
) -> None:
    """Round keys and values and store them at these slots; only padding may repeat a slot."""
    _, num_tokens, num_heads, size = heads_2TGD.shape
    rows, groups = num_tokens * num_heads, kv.form.scales_of(size)
    if not rows:
        return
    block = triton.next_power_of_2(size // groups)
    tile = max(_NUMBERS // (block * triton.next_power_of_2(groups)), 1)
    _round_heads[(triton.cdiv(rows, tile), 2)](
        heads_2TGD,
        *kv.keys,
        *kv.values,
        slots_T.contiguous(),
        rows,
        kv.form.largest,
        HEADS=num_heads,
        SIZE=size,
        GROUPS=groups,
        BITS=kv.form.bits,
        ROWS=tile,
        PARTS=triton.next_power_of_2(groups),
        BLOCK=block,
        num_warps=4,
        **overlapped(pdl),
    )


def _error(args: Items[Any], got: Items[Tensor], expected: Items[Tensor]) -> float:
    """Return the error of the attention output; infinite if stored heads are too far off.

    A few numbers near a midpoint may be rounded the other way.
    """
    form = args[2].form
    for at in (1, 3):  # keys, values
        ours, theirs = (Rounded(*found[at : at + 2]) for found in (got, expected))
        far = (widen_heads(ours, form, _WIDE) - widen_heads(theirs, form, _WIDE)).abs()
        scale = theirs.pairs_NP2[..., :1].to(_WIDE)
        steps = far.unflatten(-1, (scale.shape[-2], -1)) / scale.clamp(min=1e-12)
        if not bool((steps < 2.5).all()) or float((steps > 0.5).float().mean()) > _MOST_DIFFERENT:
            return math.inf
    return largest_error(args, got[:1], expected[:1])


def _bfloat16(*_: Any) -> torch.dtype:
    return torch.bfloat16  # a number that is rounded the other way moves by a step, in any dtype


QUANTIZED_ATTEND: Final = Kernel(
    "quantized_attend",
    quantized_kv.quantized_attend,
    quantized_attend,
    written=lambda _heads, _rotary, kv, _slots, _windows: (*kv.keys, *kv.values),
    error=_error,
    precision=_bfloat16,
)


@triton.jit(do_not_specialize=["rows"])
def _round_heads(
    heads_ptr,
    keys_ptr,
    key_pairs_ptr,
    values_ptr,
    value_pairs_ptr,
    slots_ptr,
    rows,
    largest,
    HEADS: tl.constexpr,
    SIZE: tl.constexpr,
    GROUPS: tl.constexpr,
    BITS: tl.constexpr,
    ROWS: tl.constexpr,
    PARTS: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """Round some heads of keys, or of values, and store them at their tokens' slots."""
    wait_for_previous(PDL)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    slot = tl.load(slots_ptr + row // HEADS, mask=row < rows, other=0).to(tl.int64)
    head = slot * HEADS + row % HEADS
    own = row.to(tl.int64)
    if tl.program_id(1) == 0:
        numbers_ptr, pairs_ptr = keys_ptr, key_pairs_ptr
    else:
        numbers_ptr, pairs_ptr = values_ptr, value_pairs_ptr
        own += rows
    width: tl.constexpr = SIZE // GROUPS
    group = tl.arange(0, PARTS)
    there = ((row < rows)[:, None] & (group < GROUPS)[None, :])[:, :, None]
    source = heads_ptr + (own[:, None] * SIZE + (group * width)[None, :])[:, :, None]
    if BITS == 8:
        at = tl.arange(0, BLOCK)[None, None, :]
        there &= at < width
        x = tl.load(source + at, mask=there, other=0.0).to(tl.float32)
        low, scale = _range(x, x, there, largest)
        number = _steps(x, low, scale, largest)
        target = (head[:, None] * SIZE + (group * width)[None, :])[:, :, None]
    else:
        at = tl.arange(0, BLOCK // 2)[None, None, :]
        there &= at < width // 2
        even = tl.load(source + at * 2, mask=there, other=0.0).to(tl.float32)
        odd = tl.load(source + at * 2 + 1, mask=there, other=0.0).to(tl.float32)
        low, scale = _range(even, odd, there, largest)
        number = _steps(even, low, scale, largest) | (_steps(odd, low, scale, largest) << 4)
        target = (head[:, None] * (SIZE // 2) + (group * (width // 2))[None, :])[:, :, None]
    tl.store(numbers_ptr + target + at, number.to(tl.uint8), mask=there)
    pair = pairs_ptr + (head[:, None] * GROUPS + group[None, :]) * 2
    live = (row < rows)[:, None] & (group < GROUPS)[None, :]
    tl.store(pair, scale.to(tl.bfloat16), mask=live)
    tl.store(pair + 1, low.to(tl.bfloat16), mask=live)


@triton.jit
def _range(x, y, there, largest):
    """Return the lowest number of each group and its scale, rounded outwards to bfloat16."""
    least = tl.min(tl.where(there, tl.minimum(x, y), float("inf")), axis=2)
    most = tl.max(tl.where(there, tl.maximum(x, y), float("-inf")), axis=2)
    least = _outwards(least, least < 0)
    scale = tl.maximum((most - least) / largest, 1e-12)
    return least, _outwards(scale, scale > 0)


@triton.jit
def _outwards(x, away):
    """Return the nearest bfloat16 numbers in float32, rounded away from zero where `away`."""
    bits = x.to(tl.int32, bitcast=True) + away.to(tl.int32) * 0xFFFF
    return (bits & -0x10000).to(tl.float32, bitcast=True)


@triton.jit
def _steps(x, low, scale, largest):
    steps = tl.floor((x - low[:, :, None]) / scale[:, :, None] + 0.5)
    return tl.minimum(tl.maximum(steps, 0.0), largest).to(tl.int32)
