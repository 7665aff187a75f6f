"""One layer of a model and its head with random weights, and steps of the sizes that engines run.

All shapes come from the config alone, so kernels can be checked before any weight is loaded.

Letters: T packed tokens, R rows of the head, H hidden size, P pages of a window.
"""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from diffray.components.backend import choose_dtype
from diffray.components.batch import Batch, Window
from diffray.components.config import Config
from diffray.components.denoiser import Denoiser
from diffray.components.kv_pool import KVPool, kv_format
from diffray.components.mesh import Mesh
from diffray.components.model_spec import ModelSpec
from diffray.components.models.registry import build_model
from diffray.components.quantization import Given, parse_quantization
from diffray.kernels.acceptance import LONGEST, Settling
from diffray.kernels.choose import TORCH, Kernels
from diffray.kernels.confidence import Draw
from diffray.kernels.credit import Rewarding
from diffray.kernels.noise import mix, spread

# Context lengths. In a short one every key has weight, so that a missing key shows as an error.
_SHORT, _NEAR, _FAR = 64, 1024, 4096
_WINDOWS, _FEW = (1, 4, 16), 8
_DRAWING = 1, 16  # numbers of windows at which tokens are also drawn


class Step(NamedTuple):
    """The windows of a step, at the ends of equal contexts."""

    windows: int
    length: int
    context: int

    @property
    def reads(self) -> bool:
        """Whether tokens are chosen for all positions, unlike in a whole prompt or canvas."""
        return self.length < self.context


class Sizes(Config):
    """What determines the shapes of a model's kernels on one rank."""

    config: Mapping[str, Any]  # the checkpoint's config.json
    dtype: str
    quantization: Given | None = None
    page_size: int = 16
    kv_cache_dtype: str = "auto"
    ranks: int = 1
    expert_parallel: bool = False

    def model(self, kernels: Kernels = TORCH) -> Denoiser:
        """Return rank 0's shard of a layer, embedding and head, unallocated."""
        mesh = Mesh(0, self.ranks, self.expert_parallel)
        dtype = choose_dtype(self.dtype, torch.device("cpu"))
        model = build_model(self.config, mesh, dtype, kernels)
        model.keep_one_layer()
        return model


def steps_of(spec: ModelSpec) -> list[Step]:
    """Return steps: a block of some sequences, two blocks, a short block, a prompt or canvas."""
    block = spec.block_length + spec.logit_shift
    near, far = min(_NEAR, spec.max_positions), min(_FAR, spec.max_positions)
    steps = [
        *(Step(windows, min(block, near), near) for windows in _WINDOWS),
        Step(1, min(2 * block, far), far),
        Step(1, min(_FEW, block), min(_SHORT, near)),
        Step(1, near, near),
    ]
    return list(dict.fromkeys(steps))


class OneLayer:
    """A model of one layer on a device, with the K/V memory for its steps."""

    def __init__(self, sizes: Sizes, device: torch.device, kernels: Kernels) -> None:
        self.model = sizes.model(kernels)
        self.model.allocate(device)
        for seed, (name, weight) in enumerate(self.model.named_parameters()):
            _fill(name, weight, seed)
        if sizes.quantization is not None:
            self.model.quantize(parse_quantization(sizes.quantization))
        self.device, self.kernels, spec = device, kernels, self.model.spec
        self.steps = steps_of(spec)
        self.mask_id = spec.vocab_size - 1 if spec.masked else -1
        pages = max(step.windows * -(-step.context // sizes.page_size) for step in self.steps)
        self.kv = KVPool(
            shapes=spec.kv_shapes,
            num_pages=pages + 1,
            page_size=sizes.page_size,
            dtype=self.model.dtype,
            device=device,
            form=kv_format(sizes.kv_cache_dtype, spec.kv_shapes),
            kernels=kernels,
        )

    def windows(self, step: Step) -> list[Window]:
        """Return the windows of a step; their pages are in no order, as in an engine."""
        pages = self.kv.pages_for(step.context)
        order_P = mix(torch.arange(step.windows * pages)).argsort() + 1
        spec = self.model.spec
        block = spec.block_length if spec.block_causal else 0
        blocks = (1, 0) if spec.encodes else (block, block)  # final tokens, and a block
        start = step.context - step.length
        return [
            Window(
                start, step.context, step.context, blocks[number % 2], own_P, number * step.context
            )
            for number, own_P in enumerate(order_P.view(step.windows, pages))
        ]

    @torch.inference_mode()
    def run(self) -> None:
        """Call each kernel as engines do, in every step.

        A second call has half of the tokens equal, like padding.
        """
        self._fill_pool()
        for step in self.steps:
            batch, x_TH = self._inputs(step)
            alike_TH = x_TH.clone()
            alike_TH[len(x_TH) // 2 :] = x_TH[0]
            for tokens_TH in (x_TH, alike_TH):
                hidden_TH = self.model.forward(tokens_TH, batch, self.kv)
                if step.reads:
                    found = self.model.confidence(hidden_TH, self.mask_id, None)
                    if step.length <= LONGEST:
                        place = Settling.made_up(step.windows, step.length, self.device)
                        self.kernels.settle(found, *place)
                    if step.windows in _DRAWING:
                        self._draw(hidden_TH, step)

    @torch.inference_mode()
    def results(self) -> list[list[Tensor]]:
        """Run every step once; return its hidden states, then the scores of its choices."""
        self._fill_pool()
        found = []
        for step in self.steps:
            batch, x_TH = self._inputs(step)
            hidden_TH = self.model.forward(x_TH, batch, self.kv)
            found.append([hidden_TH])
            if step.reads:
                chosen = self.model.confidence(hidden_TH, self.mask_id, None)
                found[-1] += [chosen.scores_R, chosen.logsumexp_R]
        return found

    def _fill_pool(self) -> None:
        """Fill the K/V of all contexts with noise; steps store theirs among it."""
        (stores,) = self.kv.stores.values()
        for seed, kept in enumerate(stores):
            if kept.dtype == torch.uint8:  # in quantized formats every byte is valid
                kept.view(-1).copy_(mix(torch.arange(kept.numel(), device=kept.device) + seed))
            else:
                spread(kept, seed, 1.0)

    def _inputs(self, step: Step) -> tuple[Batch, Tensor]:
        batch = Batch.pack(self.windows(step), self.device, self.kv.page_size)
        shape = step.windows * step.length, self.model.spec.hidden_size
        x_TH = torch.empty(shape, dtype=self.model.dtype, device=self.device)
        spread(x_TH, step.windows, 1.0)
        return batch, x_TH

    def _draw(self, hidden_RH: Tensor, step: Step) -> None:
        """Draw tokens, then choose the best ones and add credit."""
        vocab = self.model.spec.vocab_size
        rows_R = torch.arange(len(hidden_RH), device=self.device)
        warm_R = (rows_R % 3).float() * 0.5
        draw = Draw(warm_R, rows_R * 77, rows_R, rows_R % step.length)
        self.model.confidence(hidden_RH, self.mask_id, draw)
        place = Rewarding.made_up(step.windows, step.length, vocab, self.device)
        known_RK = place.credits.known(place.cells_R)
        found = self.model.confidence(hidden_RH, self.mask_id, None, known_RK)
        self.kernels.reward(found, *place)


def _fill(name: str, weight: Tensor, seed: int) -> None:
    """Fill a weight with noise, scaled so that activations keep their size; none is just 0 or 1."""
    if name.endswith(("bias_E", "bias_O")):
        spread(weight, seed, 0.02)
    elif weight.dim() == 1 or name.endswith("norm.weight_ND"):
        spread(weight, seed, 0.2)
        weight.add_(1.0)
    elif name.startswith("embedding"):
        spread(weight, seed, 1.0)
    else:
        spread(weight, seed, weight.shape[-1] ** -0.5)


def shapes_of(model: Denoiser) -> Iterator[str]:
    """Yield a line for each parameter, and one for everything else that kernels depend on."""
    for name, weight in model.named_parameters():
        yield f"{name} {tuple(weight.shape)} {weight.dtype}"
    yield f"{model.spec} {replace(model.dims, layers=1)}"
