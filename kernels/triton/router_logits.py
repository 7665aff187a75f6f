"""The product of hidden states with a router's weights in Triton, split over the hidden size.

A router decides by small differences, so its weights are float32. Matrix units take them as three
bfloat16 parts, which together are exact; states in other dtypes are multiplied in float32.

Letters: T packed tokens, H hidden size, C splits of it, E experts.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from diffray.kernels.triton.launch import overlapped, wait_for_previous

_ROWS = 16  # fixed, so that a token's sums do not depend on how many tokens there are
_MOST_COLUMNS, _MOST_SPLITS = 64, 32


def split_logits(x_TH: Tensor, weight_EH: Tensor, pdl: bool) -> tuple[Tensor, Tensor]:
    """Return the splits' float32 logits [C, T, E], to be summed, and a counter at 0."""
    (num_tokens, hidden), num_experts = x_TH.shape, weight_EH.shape[0]
    depth = max(triton.next_power_of_2(triton.cdiv(hidden, _MOST_SPLITS)), 16)
    columns = min(max(triton.next_power_of_2(num_experts), 16), _MOST_COLUMNS)
    num_splits = triton.cdiv(hidden, depth)
    device = x_TH.device
    logits_CTE = torch.empty(num_splits, num_tokens, num_experts, device=device)
    counter = torch.empty(1, dtype=torch.int32, device=device)
    if num_tokens:
        _multiply[(triton.cdiv(num_tokens, _ROWS), triton.cdiv(num_experts, columns), num_splits)](
            x_TH.contiguous(),
            weight_EH,
            logits_CTE,
            counter,
            num_tokens,
            hidden,
            num_experts,
            IN_PARTS=x_TH.dtype == torch.bfloat16,
            ROWS=_ROWS,
            COLUMNS=columns,
            DEPTH=depth,
            num_warps=4,
            **overlapped(pdl),
        )
    return logits_CTE, counter


@triton.jit(do_not_specialize=["num_tokens"])
def _multiply(
    x_ptr,
    w_ptr,
    out_ptr,
    counter_ptr,
    num_tokens,
    hidden,
    num_experts,
    IN_PARTS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    PDL: tl.constexpr,
):
    """Multiply some tokens with some experts' weights, in one split of the hidden size."""
    split = tl.program_id(2)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    at = split * DEPTH + tl.arange(0, DEPTH)
    live, wide, inside = row < num_tokens, column < num_experts, at < hidden
    w_at = w_ptr + column[:, None] * hidden + at[None, :]
    w = tl.load(w_at, mask=wide[:, None] & inside[None, :], other=0.0).to(tl.float32)
    wait_for_previous(PDL)
    if tl.program_id(0) + tl.program_id(1) + split == 0:
        tl.store(counter_ptr, 0)
    x_at = x_ptr + row.to(tl.int64)[:, None] * hidden + at[None, :]
    x = tl.load(x_at, mask=live[:, None] & inside[None, :], other=0.0)
    if IN_PARTS:
        high = w.to(tl.bfloat16)
        rest = w - high.to(tl.float32)
        middle = rest.to(tl.bfloat16)
        low = (rest - middle.to(tl.float32)).to(tl.bfloat16)
        logits = tl.dot(x, tl.trans(low))
        logits = tl.dot(x, tl.trans(middle), logits)
        logits = tl.dot(x, tl.trans(high), logits)
    else:
        logits = tl.dot(x.to(tl.float32), tl.trans(w), input_precision="ieee")
    out_row = (split.to(tl.int64) * num_tokens + row) * num_experts
    tl.store(
        out_ptr + out_row[:, None] + column[None, :], logits, mask=live[:, None] & wide[None, :]
    )
