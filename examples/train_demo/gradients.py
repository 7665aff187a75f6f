"""The parts of a layer that passes.c fuses, each with its gradient, and the same parts in torch.

Shapes: B rows, L length, h heads, g key heads, D size of a head, R half of its rotated part, T
tokens, H hidden, F inner, E experts, K chosen experts, S = T K copies sorted by expert, N, V.
"""

import functools
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from examples.train_demo.passes import Passes, Sizes


@functools.cache
def products_dtype() -> torch.dtype:
    """Return bfloat16 if the processor multiplies it in hardware, else float32."""
    able = torch.cpu.get_capabilities()
    return torch.bfloat16 if able.get("amx_bf16") or able.get("avx512_bf16") else torch.float32


def linear(x: Tensor, weight: Tensor) -> Tensor:
    """Return x weight^T in float32, computed in the processor's fast dtype."""
    dtype = products_dtype()
    return F.linear(x.to(dtype), weight.to(dtype)).float()


class Sight(NamedTuple):
    """The rotary angles of positions, and what they attend to: blocks up to their own."""

    cos_LR: Tensor
    sin_LR: Tensor
    block: int
    real_BL: Tensor | None  # None: all positions are real


def fused(function: type[torch.autograd.Function], *values: Any) -> Any:
    """Apply one of the functions below."""
    return function.apply(*values)


class RmsNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, passes: Passes, x_TH: Tensor, weight_H: Tensor, eps: float) -> Tensor:
        tokens, hidden = x_TH.shape
        y_TH, scale_T = torch.empty_like(x_TH), torch.empty(tokens)
        passes.call("rms_norm", tokens, hidden, eps, x_TH, weight_H, y_TH, scale_T)
        ctx.save_for_backward(x_TH, weight_H, scale_T)
        ctx.passes = passes
        return y_TH

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy_TH: Tensor) -> tuple[None, Tensor, Tensor, None]:
        x_TH, weight_H, scale_T = ctx.saved_tensors
        dx_TH, dw_H = torch.empty_like(x_TH), torch.zeros_like(weight_H)
        ctx.passes.call(
            "rms_norm_back", *x_TH.shape, x_TH, weight_H, scale_T, dy_TH.contiguous(), dx_TH, dw_H
        )
        return None, dx_TH, dw_H, None


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    y: Tensor = x * (x.square().mean(-1, keepdim=True) + eps).rsqrt() * weight
    return y


class Attend(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, passes: Passes, qkv: Tensor, q_w: Tensor, k_w: Tensor, sight: Sight,
        heads: tuple[int, int, int], eps: float,
    ) -> Tensor:  # fmt: skip
        (rows, length, _), half = qkv.shape, sight.cos_LR.shape[1]
        ctx.sizes = Sizes(rows, length, *heads, half, sight.block, eps)
        y = torch.empty(rows, length, heads[0] * heads[2])
        ctx.save_for_backward(qkv, q_w, k_w)
        ctx.passes, ctx.sight = passes, sight
        passes.call("attend", ctx.sizes, qkv, q_w, k_w, sight.cos_LR, sight.sin_LR, y)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        qkv, q_w, k_w = ctx.saved_tensors
        dqkv, dq_w, dk_w = torch.empty_like(qkv), torch.zeros_like(q_w), torch.zeros_like(k_w)
        ctx.passes.call(
            "attend_back", ctx.sizes, qkv, q_w, k_w, ctx.sight.cos_LR, ctx.sight.sin_LR,
            dy.contiguous(), dqkv, dq_w, dk_w,
        )  # fmt: skip
        return None, dqkv, dq_w, dk_w, None, None, None


def attend(
    qkv: Tensor, q_w: Tensor, k_w: Tensor, sight: Sight, heads: tuple[int, int, int], eps: float
) -> Tensor:
    """Return attention over queries, keys and values side by side, [B, L, (h + 2 g) D]."""
    num, num_kv, dim = heads
    q, k, v = qkv.split([num * dim, num_kv * dim, num_kv * dim], dim=-1)
    q = rotate(rms_norm(q.unflatten(-1, (num, dim)), q_w, eps), sight).transpose(1, 2)
    k = rotate(rms_norm(k.unflatten(-1, (num_kv, dim)), k_w, eps), sight).transpose(1, 2)
    v = v.unflatten(-1, (num_kv, dim)).transpose(1, 2)
    k, v = (t.repeat_interleave(num // num_kv, dim=1) for t in (k, v))
    score = (q * dim**-0.5) @ k.transpose(-1, -2)
    score = score.masked_fill(~seen(qkv.shape[1], sight), -torch.inf)
    y: Tensor = score.softmax(-1) @ v
    return y.transpose(1, 2).flatten(2)


def seen(length: int, sight: Sight) -> Tensor:
    """Return which keys each query attends to, [B, 1, L, L]."""
    number_L = torch.arange(length) // sight.block
    see_1LL = (number_L[:, None] >= number_L)[None]
    if sight.real_BL is not None:
        see_1LL = see_1LL & sight.real_BL[:, None]
    return see_1LL[:, None]


def rotate(x_BLhD: Tensor, sight: Sight) -> Tensor:
    """Apply rotary embedding by halves to the first dimensions; the rest passes through."""
    cos, sin = sight.cos_LR[:, None], sight.sin_LR[:, None]
    half = cos.shape[-1]
    a, b, rest = x_BLhD.split([half, half, x_BLhD.shape[-1] - 2 * half], dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin, rest), dim=-1)


class Swiglu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, passes: Passes, x_T2F: Tensor) -> Tensor:
        ctx.passes = passes
        ctx.save_for_backward(x_T2F)
        y_TF = x_T2F.new_empty(len(x_T2F), x_T2F.shape[1] // 2)
        passes.call("swiglu", *y_TF.shape, x_T2F, y_TF)
        return y_TF

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy_TF: Tensor) -> tuple[None, Tensor]:
        (x_T2F,) = ctx.saved_tensors
        dx_T2F = torch.empty_like(x_T2F)
        ctx.passes.call("swiglu_back", *dy_TF.shape, x_T2F, dy_TF.contiguous(), dx_T2F)
        return None, dx_T2F


def swiglu(x_T2F: Tensor) -> Tensor:
    gate, up = x_T2F.chunk(2, dim=-1)
    return F.silu(gate) * up


class Experts(torch.autograd.Function):
    """All experts of a layer in one product, each padded to the tokens of the busiest one, R.

    R is a multiple of 32, because oneDNN compiles a product for each new shape.
    """

    @staticmethod
    def forward(
        ctx: Any, passes: Passes, x_TH: Tensor, chosen_TK: Tensor, weight_TK: Tensor,
        w13: Tensor, w2: Tensor,
    ) -> Tensor:  # fmt: skip
        (tokens, hidden), top = x_TH.shape, chosen_TK.shape[1]
        room = -(-int(chosen_TK.flatten().bincount().max()) // 32) * 32
        place_TK, y_TH = torch.empty_like(chosen_TK), torch.empty_like(x_TH)
        x_ERH = x_TH.new_zeros(len(w13), room, hidden)
        sizes = tokens, top, len(w13), hidden, room
        passes.call("scatter", *sizes, chosen_TK, x_TH, place_TK, x_ERH)
        dtype = products_dtype()
        x_ERH, w13, w2 = x_ERH.to(dtype), w13.to(dtype), w2.to(dtype)
        inner_ER2F = (x_ERH @ w13.mT).float()
        act_ERF = x_TH.new_empty(len(w13), room, w2.shape[2])
        passes.call("swiglu", len(w13) * room, w2.shape[2], inner_ER2F, act_ERF)
        act_ERF = act_ERF.to(dtype)
        y_ERH = (act_ERF @ w2.mT).float()
        passes.call("combine", tokens, top, hidden, place_TK, weight_TK, y_ERH, y_TH)
        ctx.save_for_backward(x_ERH, inner_ER2F, act_ERF, y_ERH, place_TK, weight_TK, w13, w2)
        ctx.passes = passes
        return y_TH

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy_TH: Tensor) -> tuple[Tensor | None, ...]:
        x_ERH, inner_ER2F, act_ERF, y_ERH, place_TK, weight_TK, w13, w2 = ctx.saved_tensors
        sizes, passes = (*place_TK.shape, dy_TH.shape[1]), ctx.passes
        dy_ERH, dweight_TK = torch.zeros_like(y_ERH), torch.empty_like(weight_TK)
        dy_TH = dy_TH.contiguous()
        passes.call("combine_back", *sizes, place_TK, weight_TK, y_ERH, dy_TH, dy_ERH, dweight_TK)
        dy_ERH = dy_ERH.to(w2.dtype)
        dact_ERF, dw2 = (dy_ERH @ w2).float(), (dy_ERH.mT @ act_ERF).float()
        dinner_ER2F = torch.empty_like(inner_ER2F)
        rows, inner = dact_ERF.shape[0] * dact_ERF.shape[1], dact_ERF.shape[2]
        passes.call("swiglu_back", rows, inner, inner_ER2F, dact_ERF, dinner_ER2F)
        dinner_ER2F = dinner_ER2F.to(w13.dtype)
        dx_ERH, dw13 = (dinner_ER2F @ w13).float(), (dinner_ER2F.mT @ x_ERH).float()
        dx_TH = torch.empty(dy_TH.shape)
        passes.call("combine", *sizes, place_TK, None, dx_ERH, dx_TH)
        return None, dx_TH, None, dweight_TK, dw13, dw2


def experts(x_TH: Tensor, chosen_TK: Tensor, weight_TK: Tensor, w13: Tensor, w2: Tensor) -> Tensor:
    order = chosen_TK.flatten().argsort(stable=True)
    rows = order // chosen_TK.shape[1]
    load = torch.bincount(chosen_TK.flatten(), minlength=len(w13)).tolist()
    parts = zip(x_TH[rows].split(load), w13.unbind(), w2.unbind(), strict=True)
    y_SH = torch.cat([linear(swiglu(linear(x, up)), down) for x, up, down in parts])
    y_SH = y_SH * weight_TK.flatten()[order, None]
    return torch.zeros(x_TH.shape).index_add(0, rows, y_SH)


class CrossEntropy(torch.autograd.Function):
    """The weighted sum; the same pass replaces the logits with their gradient."""

    @staticmethod
    def forward(
        ctx: Any, passes: Passes, logits_NV: Tensor, target_N: Tensor, weight_N: Tensor
    ) -> tuple[Tensor, Tensor]:
        loss, right, gradient_NV = torch.empty(()), torch.empty(()), logits_NV.detach()
        passes.call("cross_entropy", *logits_NV.shape, gradient_NV, target_N, weight_N, loss, right)
        ctx.save_for_backward(gradient_NV)
        ctx.mark_non_differentiable(right)
        return loss, right

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dloss: Tensor, _: Tensor) -> tuple[None, Tensor, None, None]:
        (gradient_NV,) = ctx.saved_tensors
        return None, gradient_NV * dloss, None, None


def cross_entropy(logits_NV: Tensor, target_N: Tensor, weight_N: Tensor) -> tuple[Tensor, Tensor]:
    """Return the weighted sums of the loss and of right answers."""
    loss = (F.cross_entropy(logits_NV, target_N, reduction="none") * weight_N).sum()
    return loss, ((logits_NV.detach().argmax(-1) == target_N) * weight_N).sum()
