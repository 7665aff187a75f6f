"""A denoising step of the model that serves, from ids to a choice for every position.

Nothing is planned and nothing is accepted: what remains has static shapes, so a CUDA graph can
hold it.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from benchmarks.gpu.cases import Work
from benchmarks.gpu.measure import PAGE_SIZE
from benchmarks.gpu.model import random_model
from benchmarks.gpu.shapes import Shape
from diffray.components.batch import Batch, Window
from diffray.components.denoiser import Denoiser
from diffray.components.experts import Experts
from diffray.components.kv_pool import KVPool
from diffray.kernels.choose import Kernels
from diffray.kernels.confidence import Confidence


class Step(NamedTuple):
    """A model, its K/V pool, and the windows that it runs."""

    model: Denoiser
    kv: KVPool
    batch: Batch
    ids_T: Tensor

    def run(self) -> Confidence:
        """Run all layers on all windows and choose a token for each position."""
        hidden_TH = self.model.forward(self.model.embed(self.ids_T), self.batch, self.kv)
        return self.model.confidence(hidden_TH, self.model.spec.vocab_size - 1, None)


def make_step(
    shape: Shape,
    work: Work,
    dtype: str,
    device: torch.device,
    kernels: Kernels,
    quantized: torch.dtype | None = None,
) -> Step:
    """Make a model of random weights and a pool of random K/V; experts may be quantized."""
    model = random_model(shape, work.context, dtype, device, kernels)
    if quantized is not None:
        model.quantize(quantized)
    window, spec = min(work.window, work.context), model.spec
    pages_RP = torch.randperm(work.rows * -(-work.context // PAGE_SIZE)) + 1
    kv = KVPool(
        num_layers=spec.num_layers,
        num_pages=len(pages_RP) + 1,
        page_size=PAGE_SIZE,
        num_heads=spec.num_kv_heads,
        head_dim=spec.head_dim,
        dtype=model.dtype,
        device=device,
        kernels=kernels,
    )
    kv.keys_LSGD.normal_()
    kv.values_LSGD.normal_()
    windows = [
        Window(work.context - window, work.context, work.context, shape.block, pages_P)
        for pages_P in pages_RP.view(work.rows, -1)
    ]
    ids_T = torch.randint(0, shape.vocab - 1, (work.tokens,), device=device)
    return Step(model, kv, Batch.pack(windows, device, PAGE_SIZE), ids_T)


def bytes_read(model: Denoiser, shape: Shape, work: Work) -> float:
    """Return the least that a step reads: weights it meets, keys and values of all contexts.

    Of experts those that its tokens meet if all are equally likely.
    """
    table = model.embedding.weight_VH
    total = _size(model) - _size(model.embedding) + work.tokens * table[0].nbytes
    for module in model.modules():
        if isinstance(module, Experts):
            missed = 1 - shape.distinct_experts(work.tokens) / _count(module)
            total -= missed * _size(module)
    position = 2 * shape.kv_heads * shape.head_dim * model.dtype.itemsize
    return total + shape.layers * work.rows * work.context * position


def flops(model: Denoiser, shape: Shape, work: Work) -> float:
    """Return the operations of a step's matrix products, attention's among them."""
    per_token = float(sum(p.numel() for p in model.parameters() if p.dim() > 1))
    per_token -= model.embedding.weight_VH.numel()
    for module in model.modules():
        if isinstance(module, Experts) and shape.sparse is not None:
            matrices = 3 * shape.hidden * shape.sparse.width
            per_token -= (_count(module) - shape.sparse.chosen) * matrices
    attention = 2 * shape.layers * work.context * shape.heads * shape.head_dim
    return 2.0 * work.tokens * (per_token + attention)


def _count(experts: Experts) -> int:
    return experts.experts.stop - experts.experts.start


def _size(module: torch.nn.Module) -> float:
    return float(sum(p.nbytes for p in module.parameters()))
