"""The programs of attention over the page table: keys of one split, and the join of splits.

Letters: as in attention.py.
"""

import triton
import triton.language as tl

from diffray.kernels.triton.launch import wait_for_previous


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
    key_pairs_ptr,
    value_pairs_ptr,
    own_keys_ptr,
    own_values_ptr,
    open_ptr,
    end_ptr,
    PAGE: tl.constexpr,
    GROUPS: tl.constexpr,
    SHARED: tl.constexpr,
    SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    BLOCK: tl.constexpr,
    SPLIT: tl.constexpr,
    BITS: tl.constexpr,
    PAIRS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Attend from some queries of one window to one split of their keys.

    Rows are (query, head) pairs, the heads of a query side by side. With BITS, pages have quantized
    heads, and keys in [open, end) are read unrounded, from this forward's tokens.
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
    start = tl.load(start_ptr + window)
    at = start + query
    # With bidirectional attention all positions are in one block that ends with the keys.
    own_end = tl.minimum((at // tl.maximum(length, 1) + 1) * length, stop)
    ends = tl.where(live, tl.where(length > 0, own_end, stop), 0)
    last = tl.max(ends, axis=0)
    share = tl.cdiv(tl.cdiv(last, splits), KEYS) * KEYS
    low = split * share
    high = tl.minimum(low + share, last)

    if BITS:
        first_open = tl.load(open_ptr + window)
        end = tl.load(end_ptr + window)

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
        head = slot * GROUPS + group
        if BITS:
            fresh = inside & (key >= first_open) & (key < end)
            own = (first + key - start).to(tl.int64) * GROUPS + group
            own_there = fresh[:, None] & (dim < SIZE)[None, :]
            kept = inside & ~fresh
            own_place = own[:, None] * SIZE + dim[None, :]
            k = tl.load(own_keys_ptr + own_place, mask=own_there, other=0.0)
            v = tl.load(own_values_ptr + own_place, mask=own_there, other=0.0)
            wide_k = _widened(keys_ptr, key_pairs_ptr, head, kept, SIZE, BLOCK, BITS, PAIRS)
            wide_v = _widened(values_ptr, value_pairs_ptr, head, kept, SIZE, BLOCK, BITS, PAIRS)
            # For each number one of the two is 0.
            k += wide_k.to(k.dtype)
            v += wide_v.to(v.dtype)
        else:
            place = head[:, None] * SIZE + dim[None, :]
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


@triton.jit
def _widened(
    numbers_ptr,
    pairs_ptr,
    head,
    kept,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    BITS: tl.constexpr,
    PAIRS: tl.constexpr,
):
    """Return quantized heads in float32; those that are not `kept` are 0."""
    rows: tl.constexpr = head.shape[0]
    parts: tl.constexpr = BLOCK // (SIZE // PAIRS) if PAIRS > 1 else 1
    width: tl.constexpr = SIZE * BITS // 8
    byte = tl.arange(0, BLOCK * BITS // 8)
    there = kept[:, None] & (byte < width)[None, :]
    number = tl.load(numbers_ptr + head[:, None] * width + byte[None, :], mask=there, other=0)
    if BITS == 4:
        number = tl.join(number & 15, number >> 4)
    number = number.reshape(rows, parts, BLOCK // parts).to(tl.float32)
    part = tl.arange(0, parts)
    pair = pairs_ptr + (head[:, None] * PAIRS + part[None, :]) * 2
    known = kept[:, None] & (part < PAIRS)[None, :]
    scale = tl.load(pair, mask=known, other=0.0).to(tl.float32)
    low = tl.load(pair + 1, mask=known, other=0.0).to(tl.float32)
    return (number * scale[:, :, None] + low[:, :, None]).reshape(rows, BLOCK)


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
