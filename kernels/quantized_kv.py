"""Quantized keys and values: how heads are rounded, stored, widened and read, in torch.

A stored number stands for `low + number * scale`. Each group of a head's numbers has its own
(scale, low), both rounded outwards to bfloat16, so every number is within its range and moves by at
most half a scale. bfloat16 has the range of float32, so no head is too large for it.

Only pages are rounded. A window reads its own keys unrounded from its open position on; those
before it are final, and it reads them rounded, as every later forward will. So what a query reads
does not depend on which forward stored it.

Letters: T packed tokens, S slots of the K/V pool, N heads of any kind, G key heads, D head size,
B bytes of a head, P pairs of a head.
"""

from typing import Final, NamedTuple

import torch
from torch import Tensor

from diffray.kernels.attention import QKRotary, attend_groups, rotate_heads
from diffray.kernels.formats import Format
from diffray.kernels.quantize import pack_nibbles, unpack_nibbles
from diffray.kernels.windows import Group, Windows

_TINY: Final = 1e-12  # smaller ranges count as this, so that no scale is 0
_LOWER_BITS: Final = 0xFFFF  # the bits of a float32 that bfloat16 drops


class Rounded(NamedTuple):
    """Quantized heads; numbers of four bits are two to a byte, the even one in the low half."""

    numbers_NB: Tensor  # uint8
    pairs_NP2: Tensor  # bfloat16: the scale and the lowest number of each group


class QuantizedKV(NamedTuple):
    """The quantized K/V pool of one layer: a row for each slot."""

    form: Format
    keys: Rounded
    values: Rounded


def round_heads(x_ND: Tensor, form: Format) -> Rounded:
    """Round heads to the format; leading dimensions stay."""
    wide = x_ND.float().unflatten(-1, (form.scales_of(x_ND.shape[-1]), -1))
    low = _outwards(wide.amin(-1), up=False)
    scale = _outwards(((wide.amax(-1) - low) / form.largest).clamp_(min=_TINY), up=True)
    steps = (wide - low.unsqueeze(-1)).div_(scale.unsqueeze(-1))
    numbers = steps.add_(0.5).floor_().clamp_(0, form.largest).to(torch.uint8).flatten(-2)
    pairs = torch.stack([scale, low], dim=-1).to(torch.bfloat16)  # exact
    return Rounded(pack_nibbles(numbers) if form.bits == 4 else numbers, pairs)


def _outwards(x: Tensor, *, up: bool) -> Tensor:
    """Return the nearest bfloat16 numbers above or below, in float32."""
    bits = x.view(torch.int32)
    away = (x > 0) if up else (x < 0)  # from zero; the other way truncates
    return ((bits + away.int() * _LOWER_BITS) & ~_LOWER_BITS).view(torch.float32)


def widen_heads(kept: Rounded, form: Format, dtype: torch.dtype, spare: int = 0) -> Tensor:
    """Return the heads in a floating dtype, computed in float32.

    `spare` rows at the end are left undefined.
    """
    numbers = unpack_nibbles(kept.numbers_NB) if form.bits == 4 else kept.numbers_NB
    rows, *others = numbers.shape
    wide = torch.empty((rows + spare, *others), device=numbers.device)
    scale, low = kept.pairs_NP2.float().unsqueeze(-1).unbind(-2)
    grouped = wide[:rows].copy_(numbers).unflatten(-1, (kept.pairs_NP2.shape[-2], -1))
    grouped.mul_(scale).add_(low)
    return wide.to(dtype)


def quantized_attend(
    heads_TND: Tensor, rotary: QKRotary, kv: QuantizedKV, slots_T: Tensor, windows: Windows
) -> Tensor:
    """Norm and rotate heads, round and store keys and values, return the attention output."""
    ready = rotate_heads(heads_TND, rotary, kv.keys.numbers_NB.shape[1])
    return quantized_attend_ready(*ready, kv, slots_T, windows.groups, windows.open_T)


def quantized_attend_ready(
    q_THD: Tensor,
    k_TGD: Tensor,
    v_TGD: Tensor,
    kv: QuantizedKV,
    slots_T: Tensor,
    groups: tuple[Group, ...],
    open_T: Tensor | None,
    scale: float | None = None,
) -> Tensor:
    """Do the same with heads that are already normed and rotated, optionally with another scale."""
    form = kv.form
    k_TGD = _store(k_TGD, kv.keys, form, slots_T, open_T)
    v_TGD = _store(v_TGD, kv.values, form, slots_T, open_T)

    def gather(group: Group) -> tuple[Tensor, Tensor]:
        return _gather(k_TGD, kv.keys, form, group), _gather(v_TGD, kv.values, form, group)

    return attend_groups(q_THD, k_TGD, v_TGD, gather, groups, scale)


def _store(
    x_TGD: Tensor, kept: Rounded, form: Format, slots_T: Tensor, open_T: Tensor | None
) -> Tensor:
    """Store heads in place, and return them as this forward reads them."""
    rounded = round_heads(x_TGD, form)
    for place, new in zip(kept, rounded, strict=True):
        place.index_copy_(0, slots_T, new)
    if open_T is None:
        return x_TGD
    return torch.where(open_T[:, None, None], x_TGD, widen_heads(rounded, form, x_TGD.dtype))


def _gather(own_TGD: Tensor, kept: Rounded, form: Format, group: Group) -> Tensor:
    """Return all keys or values of a group's windows, their own as this forward reads them."""
    assert group.keys_BK is not None
    slots = group.keys_BK.flatten()
    near = Rounded(*(part.index_select(0, slots) for part in kept))
    found = widen_heads(near, form, own_TGD.dtype, spare=1)  # padding writes there
    own = own_TGD[group.start : group.start + group.windows * group.queries]
    found.index_copy_(0, group.own_places, own)
    near_BKGD: Tensor = found[:-1].unflatten(0, (group.windows, -1))
    return near_BKGD
