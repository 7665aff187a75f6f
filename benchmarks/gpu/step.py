"""A denoising step of the serving model, from ids to a choice for every position.

Nothing is planned or accepted, so all shapes are static, and a CUDA graph can hold the step.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from benchmarks.gpu.cases import PAGE_SIZE, last_windows
from benchmarks.gpu.random_model import random_model
from benchmarks.gpu.shapes import Shape, Work
from diffray.components.batch import Batch
from diffray.components.denoiser import Denoiser
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
    device: torch.device,
    kernels: Kernels,
    dtype: str = "bfloat16",
    weights: str = "bfloat16",
) -> Step:
    """Make a model of random weights and a pool of random K/V."""
    model = random_model(shape, work.context, work.tokens, device, kernels, dtype, weights)
    batch, num_pages = last_windows(shape, work, device)
    spec = model.spec
    kv = KVPool(
        shapes=spec.kv_shapes,
        num_pages=num_pages,
        page_size=PAGE_SIZE,
        dtype=model.dtype,
        device=device,
        kernels=kernels,
    )
    kv.keys_LSGD.normal_()
    kv.values_LSGD.normal_()
    ids_T = torch.randint(0, shape.vocab - 1, (work.tokens,), device=device)
    return Step(model, kv, batch, ids_T)
