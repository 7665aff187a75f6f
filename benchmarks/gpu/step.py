"""A model's denoising step from embeddings to tokens, of random weights made on the device.

It is what `components/` runs, without loading, ranks or requests: one function of static shapes,
which a CUDA graph can hold, over either set of kernels.

Letters: T packed tokens, H hidden size, N heads, D head size, E experts, I intermediate size
(F = 2I), V vocabulary, S slots of the K/V pool, L layers, G key heads, R rotated size.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import embedding, linear, silu

from benchmarks.gpu.cases import EPS, Work
from benchmarks.gpu.shapes import Shape
from benchmarks.gpu.windows import Batch, last_windows
from diffray.kernels.attention import QKRotary
from diffray.kernels.choose import Kernels
from diffray.kernels.confidence import Confidence
from diffray.kernels.quantized import quantize_rows
from diffray.kernels.rope import rope_tables


@dataclass(frozen=True, slots=True)
class Dense:
    """A gated MLP."""

    w13_FH: Tensor
    w2_HI: Tensor

    def __call__(self, x_TH: Tensor) -> Tensor:
        gate_TI, up_TI = linear(x_TH, self.w13_FH).chunk(2, dim=-1)
        return linear(silu(gate_TI).mul_(up_TI), self.w2_HI)


@dataclass(frozen=True, slots=True)
class Routed:
    """Routed experts, of which the quantized have scales, and perhaps a shared one."""

    router_EH: Tensor
    bias_E: Tensor
    w13_EFH: Tensor
    scale13_EF: Tensor | None
    w2_EHI: Tensor
    scale2_EH: Tensor | None
    shared: Dense | None


@dataclass(frozen=True, slots=True)
class Layer:
    """One layer's weights; `norm_H` stands before its attention, `mlp_norm_H` before its MLP."""

    norm_H: Tensor
    qkv: Tensor
    head_norm_ND: Tensor | None
    out: Tensor
    mlp_norm_H: Tensor
    mlp: Dense | Routed


@dataclass(frozen=True, slots=True)
class Step:
    """A model, its K/V pool, and the windows that it runs."""

    shape: Shape
    table_VH: Tensor
    head_VH: Tensor
    last_norm_H: Tensor
    layers: list[Layer]
    keys_LSGD: Tensor
    values_LSGD: Tensor
    batch: Batch
    cos_T1R: Tensor
    sin_T1R: Tensor
    ids_T: Tensor
    mask_T1: Tensor

    def run(self, kernels: Kernels) -> Confidence:
        """Run all layers on all windows and choose a token for each position."""
        x_TH = embedding(self.ids_T, self.table_VH)
        normed_TH = kernels.rms_norm(x_TH, self.layers[0].norm_H, EPS)
        norms = [layer.norm_H for layer in self.layers[1:]] + [self.last_norm_H]
        for index, (layer, next_norm_H) in enumerate(zip(self.layers, norms, strict=True)):
            pools = self.keys_LSGD[index], self.values_LSGD[index]
            heads_TND = linear(normed_TH, layer.qkv).unflatten(1, (-1, self.shape.head_dim))
            q_TND = kernels.rotate_and_store(
                heads_TND,
                QKRotary(layer.head_norm_ND, EPS, self.cos_T1R, self.sin_T1R),
                *pools,
                self.batch.slots_T,
            )
            read_TND = kernels.paged_attention(q_TND, *pools, self.batch.windows)
            x_TH, normed_TH = kernels.add_norm(
                linear(read_TND.flatten(1), layer.out), x_TH, layer.mlp_norm_H, EPS
            )
            x_TH, normed_TH = kernels.add_norm(
                self._mlp(kernels, layer.mlp, normed_TH), x_TH, next_norm_H, EPS
            )
        mask = self.shape.vocab - 1
        return kernels.confidence(normed_TH, self.head_VH, 0, mask, self.mask_T1, None)

    def _mlp(self, kernels: Kernels, mlp: Dense | Routed, x_TH: Tensor) -> Tensor:
        if isinstance(mlp, Dense):
            return mlp(x_TH)
        sparse = self.shape.sparse
        assert sparse is not None
        logits_TE = linear(x_TH.float(), mlp.router_EH)
        if sparse.groups:
            ids_TK, weights_TK = kernels.grouped_sigmoid_topk(
                logits_TE,
                mlp.bias_E,
                sparse.chosen,
                num_groups=sparse.groups,
                groups_chosen=sparse.groups_chosen,
                scale=2.5,
            )
        else:
            ids_TK, weights_TK = kernels.softmax_topk(logits_TE, None, sparse.chosen)
        if mlp.scale13_EF is None:
            out_TH = kernels.experts_forward(x_TH, mlp.w13_EFH, mlp.w2_EHI, ids_TK, weights_TK)
        else:
            out_TH = kernels.quantized_experts_forward(
                x_TH, mlp.w13_EFH, mlp.scale13_EF, mlp.w2_EHI, mlp.scale2_EH, ids_TK, weights_TK
            )
        return out_TH if mlp.shared is None else out_TH + mlp.shared(x_TH)

    def bytes(self) -> float:
        """Return the least that a step reads: weights it meets, keys and values of all contexts.

        Of experts those that its tokens meet if all are equally likely.
        """
        tokens = len(self.ids_T)
        met = self.shape.distinct_experts(tokens)
        total = float(_bytes(self.head_VH)) + tokens * self.table_VH.shape[1] * _item(self.table_VH)
        for layer in self.layers:
            total += _bytes(layer.qkv) + _bytes(layer.out)
            if isinstance(layer.mlp, Dense):
                total += _bytes(layer.mlp.w13_FH) + _bytes(layer.mlp.w2_HI)
                continue
            mlp = layer.mlp
            total += met / len(mlp.w13_EFH) * (_bytes(mlp.w13_EFH) + _bytes(mlp.w2_EHI))
            total += _bytes(mlp.router_EH)
            if mlp.shared is not None:
                total += _bytes(mlp.shared.w13_FH) + _bytes(mlp.shared.w2_HI)
        windows = self.batch.windows
        keys = len(windows.start_W) * self.batch.context
        position = self.keys_LSGD[0, 0].numel() * _item(self.keys_LSGD)
        return total + 2.0 * len(self.layers) * keys * position

    def flops(self) -> float:
        """Return the operations of a step's matrix products, attention's among them."""
        tokens = len(self.ids_T)
        per_token = float(self.head_VH.numel())
        sparse = self.shape.sparse
        for layer in self.layers:
            per_token += layer.qkv.numel() + layer.out.numel()
            if isinstance(layer.mlp, Dense):
                per_token += layer.mlp.w13_FH.numel() + layer.mlp.w2_HI.numel()
                continue
            assert sparse is not None
            per_token += sparse.chosen * 3 * self.shape.hidden * sparse.width
            per_token += 3 * self.shape.hidden * sparse.shared_width
        keys = self.batch.context
        attention = 2 * len(self.layers) * keys * self.shape.heads * self.shape.head_dim
        return 2.0 * tokens * (per_token + attention)


def _item(x: Tensor) -> int:
    return x.element_size()


def _bytes(x: Tensor) -> int:
    return x.numel() * x.element_size()


def make_step(
    shape: Shape,
    work: Work,
    dtype: torch.dtype,
    device: torch.device | str,
    quantized: torch.dtype | None = None,
) -> Step:
    """Make a model of random weights and a pool of random keys; experts may be quantized."""

    def normal(*size: int) -> Tensor:
        """Weights that keep the size of what they multiply."""
        weights: Tensor = torch.randn(size, device=device, dtype=dtype).mul_(size[-1] ** -0.5)
        return weights

    def ones(*size: int) -> Tensor:
        return torch.ones(size, device=device, dtype=dtype)

    def dense(width: int) -> Dense:
        return Dense(normal(2 * width, shape.hidden), normal(shape.hidden, width))

    def routed() -> Routed:
        sparse = shape.sparse
        assert sparse is not None
        w13: tuple[Tensor, Tensor | None] = (
            normal(sparse.experts, 2 * sparse.width, shape.hidden),
            None,
        )
        w2: tuple[Tensor, Tensor | None] = (
            normal(sparse.experts, shape.hidden, sparse.width),
            None,
        )
        if quantized is not None:
            w13, w2 = quantize_rows(w13[0], quantized), quantize_rows(w2[0], quantized)
        return Routed(
            normal(sparse.experts, shape.hidden).float(),
            torch.zeros(sparse.experts, device=device),
            *w13,
            *w2,
            dense(sparse.shared_width) if sparse.shared_width else None,
        )

    def layer(index: int) -> Layer:
        heads = shape.heads + shape.kv_heads
        is_dense = shape.sparse is None or index < shape.sparse.dense_layers
        return Layer(
            ones(shape.hidden),
            normal((heads + shape.kv_heads) * shape.head_dim, shape.hidden),
            ones(heads, shape.head_dim) if shape.head_norm else None,
            normal(shape.hidden, shape.heads * shape.head_dim),
            ones(shape.hidden),
            dense(shape.width) if is_dense else routed(),
        )

    batch = last_windows(work.rows, work.window, work.context, shape.block, device)
    slots = batch.num_pages * batch.windows.page_size
    pool = (shape.layers, slots, shape.kv_heads, shape.head_dim)
    cos_T1R, sin_T1R = (
        table.to(device)[batch.positions_T].unsqueeze(1)
        for table in rope_tables(work.context, shape.rotated, 5e5, torch.float32)
    )
    ids_T = torch.randint(0, shape.vocab - 1, (work.tokens,), device=device)
    return Step(
        shape,
        torch.randn(shape.vocab, shape.hidden, device=device, dtype=dtype),
        normal(shape.vocab, shape.hidden),
        ones(shape.hidden),
        [layer(index) for index in range(shape.layers)],
        torch.randn(pool, device=device, dtype=dtype),
        torch.randn(pool, device=device, dtype=dtype),
        batch,
        cos_T1R,
        sin_T1R,
        ids_T,
        torch.full((work.tokens, 1), shape.vocab - 1, device=device),
    )
