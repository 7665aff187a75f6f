"""Attention of packed windows over the page table in Triton, without copying keys.

A program holds some queries of one window, for all query heads that share a key head, and iterates
over that head's keys with a running maximum. A few windows do not fill a GPU, so the keys are split
over programs as well, and a second kernel combines the results.

Letters: T packed tokens, Q query heads, G key heads, D head size, S slots of the K/V pool, W
windows, P pages of a window, C splits of the keys.
"""

from functools import partial
from typing import Final

import torch
import triton
import triton.language as tl
from torch import Tensor

from diffray.kernels import attention
from diffray.kernels.attention import KVLayer, QKRotary
from diffray.kernels.triton.launch import overlapped, tiled_variants, wait_for_previous
from diffray.kernels.triton.rope import rotate_and_store
from diffray.kernels.variants import Kernel, Shape, Tile, Variant, rounded_up
from diffray.kernels.windows import PagedWindows, Windows

_PROGRAMS = 512  # enough to fill a GPU of 132 multiprocessors
_SPLIT_KEYS = 256  # of one program, unless a variant says less: shorter splits cost more to join
_MOST_SPLITS = 32


def attend(
    heads_TND: Tensor,
    rotary: QKRotary,
    kv: KVLayer,
    slots_T: Tensor,
    windows: Windows,
    tile: Tile | None = None,
    *,
    split_keys: int = _SPLIT_KEYS,
    pdl: bool = False,
) -> Tensor:
    """Norm and rotate heads, store keys and values in place, return the attention output."""
    q_TQD = rotate_and_store(heads_TND, rotary, *kv, slots_T, pdl=pdl)
    return paged_attention(q_TQD, *kv, windows.paged, tile, split_keys=split_keys, pdl=pdl)


def paged_attention(
    q_TQD: Tensor,
    keys_SGD: Tensor,
    values_SGD: Tensor,
    windows: PagedWindows,
    tile: Tile | None = None,
    *,
    split_keys: int = _SPLIT_KEYS,
    pdl: bool = False,
) -> Tensor:
    """Return each query's attention over the keys of its sequence; the pool is not modified.

    Tokens outside all windows are undefined.
    """
    num_tokens, num_queries, size = q_TQD.shape
    num_keys = keys_SGD.shape[1]
    num_windows, num_pages = windows.pages_WP.shape
    if num_tokens == 0 or num_windows == 0:
        return torch.empty_like(q_TQD)
    q_TQD = q_TQD.contiguous()
    shared = num_queries // num_keys
    tile = tile or _tile_for(windows.max_queries * shared, size, q_TQD.element_size())
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
        num_warps=tile.warps,
        num_stages=tile.stages,
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


def _tile_for(rows: int, size: int, itemsize: int) -> Tile:
    """Return a tile: rows of queries, columns of keys; its depth is a whole head."""
    rows = max(triton.next_power_of_2(rows), 16)
    depth = max(triton.next_power_of_2(size), 16)
    if itemsize > 2:  # exact float32 uses no matrix units, so small tiles suffice
        return Tile(min(rows, 16), 32, depth, 4, 2)
    # Three stages of a wide head's keys and values do not fit shared memory.
    return Tile(min(rows, 64), 64, depth, 4, 3) if depth <= 128 else Tile(16, 32, depth, 4, 2)


def _variants(
    heads_TND: Tensor, _rotary: QKRotary, kv: KVLayer, _slots_T: Tensor, windows: Windows
) -> list[Variant]:
    """Return the default tile for windows of about this length, then others, then shorter splits.

    A window or two do not fill a GPU with splits of 256 keys.
    """
    _, num_keys, size = kv.keys_SGD.shape
    num_windows, num_pages = windows.paged.pages_WP.shape
    shared = heads_TND.shape[1] // num_keys - 2
    rows = rounded_up(windows.paged.max_queries) * shared
    default = _tile_for(rows, size, heads_TND.element_size())
    others = [
        Tile(rows, *rest)
        for rows in (default.rows, max(default.rows // 2, 16))
        for rest in _others(default.depth, heads_TND.element_size())
    ]
    tiles = list(dict.fromkeys([default, *others]))
    found = tiled_variants(tiles, attend)
    max_keys = rounded_up(num_pages * windows.paged.page_size)
    programs = triton.cdiv(rows, default.rows) * num_keys * rounded_up(num_windows)
    splits = num_splits(programs, max_keys)
    for split_keys in (128, 64):
        shorter, splits = splits, num_splits(programs, max_keys, split_keys)
        if splits > shorter:
            fitting = [tile for tile in tiles if tile.columns <= split_keys]
            run = partial(attend, split_keys=split_keys)
            found += tiled_variants(fitting, run, f"triton {split_keys} keys")
    return found


def _others(depth: int, itemsize: int) -> list[tuple[int, int, int, int]]:
    """Return columns, depth, warps and stages that may be faster than the default's."""
    if itemsize > 2:  # others take long to compile
        return []
    if depth > 128:  # more would not fit shared memory
        return [(32, depth, 4, 2), (32, depth, 8, 2)]
    return [(32, depth, 4, 3), (64, depth, 4, 2), (64, depth, 4, 3), (128, depth, 8, 3)]


def _shape(
    heads_TND: Tensor, rotary: QKRotary, kv: KVLayer, _slots_T: Tensor, windows: Windows
) -> Shape:
    """Return the heads' facts, then the length of windows, their number and their contexts'."""
    paged = windows.paged
    num_windows, num_pages = paged.pages_WP.shape
    heads = heads_TND.shape[1], *kv.keys_SGD.shape[1:], rotary.cos_T1R.shape[-1]
    normed = "plain" if rotary.norm_ND is None else "normed"
    sizes = paged.max_queries, num_windows, num_pages * paged.page_size
    return Shape(
        (*heads, normed, paged.page_size, str(heads_TND.dtype)), tuple(map(rounded_up, sizes))
    )


ATTEND: Final = Kernel(
    "attend",
    attention.attend,
    _shape,
    _variants,
    written=lambda _heads, _rotary, kv, _slots, _windows: kv,
    tolerance=0.8,
)


def num_splits(programs: int, max_keys: int, split_keys: int = _SPLIT_KEYS) -> int:
    """Return the number of splits of the keys, from bounds known on the host."""
    return max(1, min(_PROGRAMS // programs, max_keys // split_keys, _MOST_SPLITS))


@triton.jit(do_not_specialize=["num_tokens", "num_pages", "splits"])
def _read_keys(
    q_ptr,
    keys_ptr,
    values_ptr,
    out_ptr,
    lse_ptr,
    first_ptr,
    start_ptr,
    stop_ptr,
    block_ptr,
    pages_ptr,
    num_tokens,
    num_pages,
    splits,
    scale,
    PAGE: tl.constexpr,
    GROUPS: tl.constexpr,
    SHARED: tl.constexpr,
    SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    BLOCK: tl.constexpr,
    SPLIT: tl.constexpr,
    PDL: tl.constexpr,
):
    """Attend from some queries of one window to one split of their keys.

    Rows are (query, head) pairs, the heads of a query side by side.
    """
    wait_for_previous(PDL)
    split = tl.program_id(0) % splits
    group = tl.program_id(1)
    window = tl.program_id(2)
    first = tl.load(first_ptr + window)
    count = (tl.load(first_ptr + window + 1) - first) * SHARED
    row = (tl.program_id(0) // splits) * ROWS + tl.arange(0, ROWS)
    live = row < count
    query = row // SHARED
    stop = tl.load(stop_ptr + window)
    length = tl.load(block_ptr + window)
    at = tl.load(start_ptr + window) + query
    # With bidirectional attention all positions are in one block that ends with the keys.
    own_end = tl.minimum((at // tl.maximum(length, 1) + 1) * length, stop)
    ends = tl.where(live, tl.where(length > 0, own_end, stop), 0)
    last = tl.max(ends, axis=0)
    share = tl.cdiv(tl.cdiv(last, splits), KEYS) * KEYS
    low = split * share
    high = tl.minimum(low + share, last)

    dim = tl.arange(0, BLOCK)
    token_head = (first + query).to(tl.int64) * (GROUPS * SHARED) + group * SHARED + row % SHARED
    here = live[:, None] & (dim < SIZE)[None, :]
    q = tl.load(q_ptr + token_head[:, None] * SIZE + dim[None, :], mask=here, other=0.0)
    top = tl.full((ROWS,), float("-inf"), tl.float32)
    mass = tl.zeros((ROWS,), tl.float32)
    read = tl.zeros((ROWS, BLOCK), tl.float32)
    for from_key in range(low, high, KEYS):
        key = from_key + tl.arange(0, KEYS)
        inside = key < high
        page = tl.load(pages_ptr + window * num_pages + key // PAGE, mask=inside, other=0)
        slot = page.to(tl.int64) * PAGE + key % PAGE
        place = (slot * GROUPS + group)[:, None] * SIZE + dim[None, :]
        there = inside[:, None] & (dim < SIZE)[None, :]
        k = tl.load(keys_ptr + place, mask=there, other=0.0)
        v = tl.load(values_ptr + place, mask=there, other=0.0)
        score = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
        seen = inside[None, :] & (key[None, :] < ends[:, None])
        score = tl.where(seen, score, float("-inf"))
        new_top = tl.maximum(top, tl.max(score, axis=1))
        # A row may have seen no key yet.
        base = tl.where(new_top == float("-inf"), 0.0, new_top)
        weight = tl.exp2(score - base[:, None])
        keep = tl.exp2(top - base)
        mass = mass * keep + tl.sum(weight, axis=1)
        read = read * keep[:, None]
        read = tl.dot(weight.to(v.dtype), v, read, input_precision="ieee")
        top = new_top
    read = read / tl.where(mass > 0.0, mass, 1.0)[:, None]
    if not SPLIT:
        at_out = out_ptr + token_head[:, None] * SIZE + dim[None, :]
        tl.store(at_out, read.to(out_ptr.dtype.element_ty), mask=here)
    else:
        part = split.to(tl.int64) * num_tokens * (GROUPS * SHARED) + token_head
        tl.store(out_ptr + part[:, None] * SIZE + dim[None, :], read, mask=here)
        lse = tl.where(mass > 0.0, top + tl.log2(tl.where(mass > 0.0, mass, 1.0)), float("-inf"))
        tl.store(lse_ptr + part, lse, mask=live)


@triton.jit(do_not_specialize=["num_tokens", "splits"])
def _join_splits(
    part_ptr,
    lse_ptr,
    out_ptr,
    num_tokens,
    splits,
    SIZE: tl.constexpr,
    QUERIES: tl.constexpr,
    COLUMNS: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """Average the splits' results for one query and head, weighted by their softmax mass."""
    wait_for_previous(PDL)
    token_head = tl.program_id(0).to(tl.int64) * QUERIES + tl.program_id(1)
    split = tl.arange(0, COLUMNS)
    part = split.to(tl.int64) * num_tokens * QUERIES + token_head
    lse = tl.load(lse_ptr + part, mask=split < splits, other=float("-inf"))
    top = tl.max(lse, axis=0)
    weight = tl.exp2(lse - tl.where(top == float("-inf"), 0.0, top))
    weight = weight / tl.maximum(tl.sum(weight, axis=0), 1e-30)
    dim = tl.arange(0, BLOCK)
    there = (split < splits)[:, None] & (dim < SIZE)[None, :]
    # A split without keys has weight 0, but its result is still finite.
    read = tl.load(part_ptr + part[:, None] * SIZE + dim[None, :], mask=there, other=0.0)
    out = tl.sum(read * weight[:, None], axis=0)
    tl.store(out_ptr + token_head * SIZE + dim, out.to(out_ptr.dtype.element_ty), mask=dim < SIZE)
