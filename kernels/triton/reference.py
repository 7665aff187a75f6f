"""What the fused kernels compute, in plain torch: the definition that each is compared with.

A kernel that replaces one function of this room has that function as its reference; here are the
references of those that replace several.
Letters: T packed tokens, H hidden size, N heads of any kind, Q query heads, G key heads, D head
size, S slots of the K/V pool, W windows, P pages of a window, R rows of the head (in `cos_T1R`:
rotated size), V this rank's vocabulary, K gathered ids, E experts, I intermediate size (F = 2I).
"""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import linear, scaled_dot_product_attention

from diffray.kernels import noise
from diffray.kernels.experts import experts_forward
from diffray.kernels.norm import rms_norm
from diffray.kernels.rope import rotate


def add_norm(
    x_TH: Tensor, residual_TH: Tensor, weight_H: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """Return the sum, which is the next residual, and its RMSNorm."""
    total_TH = residual_TH + x_TH
    return total_TH, rms_norm(total_TH, weight_H, eps)


def rotate_and_store(
    heads_TND: Tensor,
    norm_ND: Tensor | None,
    eps: float,
    cos_T1R: Tensor,
    sin_T1R: Tensor,
    keys_SGD: Tensor,
    values_SGD: Tensor,
    slots_T: Tensor,
) -> Tensor:
    """Return the queries, normed and rotated; store the keys, done alike, and the values in place.

    N = Q + 2G: query heads, key heads, value heads. `norm_ND` has a row for each query and key
    head; None leaves the norm out. No slot may be given twice, except for what nobody reads.
    """
    num_keys = keys_SGD.shape[1]
    num_rotated = heads_TND.shape[1] - num_keys
    x_TND = heads_TND[:, :num_rotated]
    if norm_ND is not None:
        x_TND = rms_norm(x_TND, norm_ND, eps)
    x_TND = rotate(x_TND, cos_T1R, sin_T1R)
    num_queries = num_rotated - num_keys
    keys_SGD[slots_T] = x_TND[:, num_queries:]
    values_SGD[slots_T] = heads_TND[:, num_rotated:]
    return x_TND[:, :num_queries]


class PagedWindows(NamedTuple):
    """Packed windows and where their keys are: all int32 tensors on the device, and two bounds.

    Window w holds the packed queries [first[w], first[w + 1]), which stand at positions from
    start[w] on. A query sees the keys [0, kv_stop[w]); where block[w] is not 0, up to the end of
    its own block of that length alone. An empty window, of no queries, is padding.
    """

    first_W: Tensor  # one more than there are windows
    start_W: Tensor
    kv_stop_W: Tensor
    block_W: Tensor
    pages_WP: Tensor  # position n is in slot pages[w, n // page_size] * page_size + n % page_size
    page_size: int
    max_queries: int  # no window has more


def paged_attention(
    q_TQD: Tensor, keys_SGD: Tensor, values_SGD: Tensor, windows: PagedWindows
) -> Tensor:
    """Return what each query reads from the keys of its own sequence; the pool is only read.

    Tokens of no window are left undefined.
    """
    out_TQD = torch.zeros_like(q_TQD)
    num_shared = q_TQD.shape[1] // keys_SGD.shape[1]
    first, starts, stops, blocks = (part.tolist() for part in windows[:4])
    size = windows.page_size
    for w, (start, stop, block) in enumerate(zip(starts, stops, blocks, strict=True)):
        queries = slice(first[w], first[w + 1])
        if queries.start == queries.stop:
            continue
        keys_K = torch.arange(stop, device=q_TQD.device)
        slots_K = windows.pages_WP[w, keys_K // size].long() * size + keys_K % size
        at = torch.arange(start, start + queries.stop - queries.start, device=q_TQD.device)
        ends = (at // block + 1) * block if block else torch.full_like(at, stop)
        k, v = (
            pool[slots_K].transpose(0, 1).repeat_interleave(num_shared, dim=0)
            for pool in (keys_SGD, values_SGD)
        )
        mask = keys_K < ends.unsqueeze(1)
        read = scaled_dot_product_attention(q_TQD[queries].transpose(0, 1), k, v, attn_mask=mask)
        out_TQD[queries] = read.transpose(0, 1)
    return out_TQD


class Draw(NamedTuple):
    """How rows draw at random."""

    temperature_R: Tensor  # float32; a row with 0 takes its best id
    seed_R: Tensor
    position_R: Tensor
    step_R: Tensor


class Confidence(NamedTuple):
    """What a decoder needs of a row of logits; all values are float32, or float64 as the logits."""

    ids_R: Tensor  # the id chosen, of equals the lowest
    scores_R: Tensor  # what it was chosen by: its logit, tempered and with noise where rows draw
    logits_R: Tensor
    logsumexp_R: Tensor  # over all ids of this rank, the forbidden one too
    gathered_RK: Tensor  # the logits of the ids asked for; 0 for those of other ranks


def confidence(
    hidden_RH: Tensor,
    head_VH: Tensor,
    start: int,
    forbidden: int,
    gather_RK: Tensor,
    draw: Draw | None,
) -> Confidence:
    """Return each row's choice among the ids [start, start + V); the forbidden id is never chosen.

    Logits are rounded to the dtype of the head, as if they had been written.
    """
    return confidence_of_logits(linear(hidden_RH, head_VH), start, forbidden, gather_RK, draw)


def confidence_of_logits(
    logits_RV: Tensor, start: int, forbidden: int, gather_RK: Tensor, draw: Draw | None
) -> Confidence:
    """Return the same as `confidence`, of logits that have been written; they are only read."""
    wide_RV = logits_RV if logits_RV.dtype == torch.float64 else logits_RV.float()
    size = wide_RV.shape[1]
    ids_V = torch.arange(start, start + size, device=wide_RV.device)
    column_RK = gather_RK - start
    here_RK = (column_RK >= 0) & (column_RK < size)
    gathered_RK = wide_RV.gather(1, column_RK.clamp(0, size - 1)).masked_fill(~here_RK, 0.0)
    scores_RV = wide_RV
    if draw is not None:
        drawn_RV = noise.gumbel(draw.seed_R, draw.position_R, draw.step_R, ids_V.unsqueeze(0))
        hot_R1 = draw.temperature_R.unsqueeze(1)
        scores_RV = torch.where(hot_R1 > 0, wide_RV / hot_R1 + drawn_RV.to(wide_RV), wide_RV)
    scores_R, index_R = scores_RV.masked_fill(ids_V == forbidden, -torch.inf).max(dim=1)
    logits_R = wide_RV.gather(1, index_R.unsqueeze(1)).squeeze(1)
    return Confidence(index_R + start, scores_R, logits_R, wide_RV.logsumexp(1), gathered_RK)


def quantize_rows(w_EOI: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return weights in int8 or float8_e4m3fn, and the float32 scale of each row [E, O]."""
    largest = 127.0 if dtype == torch.int8 else torch.finfo(dtype).max
    scale_EO = w_EOI.float().abs().amax(dim=2).clamp(min=1e-12) / largest
    scaled_EOI = w_EOI.float() / scale_EO.unsqueeze(2)
    if dtype == torch.int8:
        scaled_EOI = scaled_EOI.round()
    return scaled_EOI.to(dtype), scale_EO


def quantized_experts_forward(
    x_TH: Tensor,
    w13_EFH: Tensor,
    scale13_EF: Tensor | None,
    w2_EHI: Tensor,
    scale2_EH: Tensor | None,
    ids_TK: Tensor,
    weights_TK: Tensor,
) -> Tensor:
    """Return what `experts_forward` does, of weights that are quantized where they have scales."""
    w13, w2 = (
        w if scale is None else (w.float() * scale.unsqueeze(2)).to(x_TH.dtype)
        for w, scale in ((w13_EFH, scale13_EF), (w2_EHI, scale2_EH))
    )
    return experts_forward(x_TH, w13, w2, ids_TK, weights_TK)
