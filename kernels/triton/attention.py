"""Attention of packed windows over the page table in Triton, without copying keys.

A program holds some queries of one window, for all query heads that share a key head, and iterates
over that head's keys with a running maximum. A few windows do not fill a GPU, so the keys are split
over programs as well, and a second kernel combines the results.

Letters: T packed tokens, Q query heads, G key heads, D head size, S slots of the K/V pool, W
windows, P pages of a window, C splits of the keys.
"""

from typing import Any, Final, NamedTuple

import torch
import triton
from torch import Tensor

from diffray.kernels import attention
from diffray.kernels.attention import KVLayer, QKRotary
from diffray.kernels.kernel import Kernel, Tile
from diffray.kernels.triton.attention_programs import _join_splits, _read_keys
from diffray.kernels.triton.launch import overlapped, staged
from diffray.kernels.triton.rope import rotate_and_store
from diffray.kernels.windows import PagedWindows, Windows

_PROGRAMS = 512  # enough to fill a GPU of 132 multiprocessors
SPLIT_KEYS = 128  # keys per program, at least; shorter splits cost more to join
_MOST_SPLITS = 32


class InBits(NamedTuple):
    """What attention reads besides the stored numbers if K/V are quantized."""

    bits: int
    key_pairs_SGP2: Tensor
    value_pairs_SGP2: Tensor
    own_2TGD: Tensor  # keys and values of this forward's tokens, unrounded


def attend(
    heads_TND: Tensor,
    rotary: QKRotary,
    kv: KVLayer,
    slots_T: Tensor,
    windows: Windows,
    *,
    split_keys: int = SPLIT_KEYS,
    pdl: bool = False,
) -> Tensor:
    """Norm and rotate heads, store keys and values in place, return the attention output."""
    q_TQD = rotate_and_store(heads_TND, rotary, *kv, slots_T, pdl=pdl)
    return paged_attention(q_TQD, *kv, windows.paged, split_keys=split_keys, pdl=pdl)


def paged_attention(
    q_TQD: Tensor,
    keys_SGD: Tensor,
    values_SGD: Tensor,
    windows: PagedWindows,
    *,
    split_keys: int = SPLIT_KEYS,
    pdl: bool = False,
    in_bits: InBits | None = None,
) -> Tensor:
    """Return each query's attention over the keys of its sequence; the pool is not modified.

    Tokens outside all windows are undefined. With `in_bits` the pool has quantized heads.
    """
    num_tokens, num_queries, size = q_TQD.shape
    num_keys = keys_SGD.shape[1]
    num_windows, num_pages = windows.pages_WP.shape
    if num_tokens == 0 or num_windows == 0:
        return torch.empty_like(q_TQD)
    q_TQD = q_TQD.contiguous()
    shared = num_queries // num_keys
    bits = in_bits.bits if in_bits is not None else 0
    tile = _tile_for(windows.max_queries * shared, size, q_TQD.element_size(), bits)
    out_TQD = torch.empty_like(q_TQD)
    tiles = triton.cdiv(windows.max_queries * shared, tile.rows)
    max_keys = num_pages * windows.page_size
    splits = num_splits(tiles * num_keys * num_windows, max_keys, split_keys)
    part_CTQD, lse_CTQ = out_TQD, None
    if splits > 1:
        part_CTQD = q_TQD.new_empty(splits, *q_TQD.shape, dtype=torch.float32)
        lse_CTQ = q_TQD.new_empty(splits, num_tokens, num_queries, dtype=torch.float32)
    _read_keys[(tiles * splits, num_keys, num_windows)](
        q_TQD,
        keys_SGD,
        values_SGD,
        part_CTQD,
        lse_CTQ,
        windows.first_W,
        windows.start_W,
        windows.kv_stop_W,
        windows.block_W,
        windows.pages_WP.contiguous(),
        num_tokens,
        num_pages,
        splits,
        size**-0.5 * 1.4426950408889634,  # base 2, for the GPU's exp2
        PAGE=windows.page_size,
        GROUPS=num_keys,
        SHARED=shared,
        SIZE=size,
        ROWS=tile.rows,
        KEYS=tile.columns,
        BLOCK=tile.depth,
        SPLIT=splits > 1,
        **staged(tile),
        **_quantized_args(in_bits, windows),
        **overlapped(pdl),
    )
    if splits > 1:
        _join_splits[(num_tokens, num_queries)](
            part_CTQD,
            lse_CTQ,
            out_TQD,
            num_tokens,
            splits,
            SIZE=size,
            QUERIES=num_queries,
            COLUMNS=triton.next_power_of_2(splits),
            BLOCK=triton.next_power_of_2(size),
            num_warps=1,
            **overlapped(pdl),
        )
    return out_TQD


def _quantized_args(in_bits: InBits | None, windows: PagedWindows) -> dict[str, Any]:
    """Return the arguments of `_read_keys` about quantized heads."""
    if in_bits is None:
        pointers = ("key_pairs", "value_pairs", "own_keys", "own_values", "open", "end")
        return {f"{name}_ptr": None for name in pointers} | {"BITS": 0, "PAIRS": 0}
    own_keys, own_values = in_bits.own_2TGD
    return {
        "key_pairs_ptr": in_bits.key_pairs_SGP2,
        "value_pairs_ptr": in_bits.value_pairs_SGP2,
        "own_keys_ptr": own_keys,
        "own_values_ptr": own_values,
        "open_ptr": windows.open_W,
        "end_ptr": windows.stop_W,
        "BITS": in_bits.bits,
        "PAIRS": in_bits.key_pairs_SGP2.shape[-2],
    }


def _tile_for(rows: int, size: int, itemsize: int, bits: int) -> Tile:
    """Return a tile: rows of queries, columns of keys; its depth is a whole head."""
    rows = max(triton.next_power_of_2(rows), 16)
    depth = max(triton.next_power_of_2(size), 16)
    if itemsize > 2:  # exact float32 uses no matrix units, so small tiles suffice
        return Tile(min(rows, 16), 32, depth, 4, 2)
    if depth > 128:  # three stages of a wide head's keys and values do not fit shared memory
        return Tile(16, 32, depth, 4, 2)
    # Heads that are widened from 4 or 8 bits take more registers.
    return Tile(min(rows, 64), 32 if bits == 4 else 64, depth, 4, 2 if bits == 8 else 3)


ATTEND: Final = Kernel(
    "attend",
    attention.attend,
    attend,
    written=lambda _heads, _rotary, kv, _slots, _windows: kv,
    tolerance=0.8,
)


def num_splits(programs: int, max_keys: int, split_keys: int = SPLIT_KEYS) -> int:
    """Return the number of splits of the keys, from bounds known on the host."""
    return max(1, min(_PROGRAMS // programs, max_keys // split_keys, _MOST_SPLITS))
