"""How close a step is to the memory's limit: the bytes it must read, over measured bandwidth."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Final
from unittest.mock import patch

import torch

from diffray.components.denoiser import Denoiser
from diffray.components.experts import Experts, SparseMLP
from diffray.components.kv_pool import position_bytes
from diffray.kernels.router import Routing
from diffray.workers.batch_plan import BatchPlan
from diffray.workers.engine import Engine

ARRAY: Final = {"cpu": 1 << 28, "cuda": 1 << 30}  # bytes: far larger than any cache
_REPEATS: Final = 5


def memory_bandwidth(device: torch.device) -> float:
    """Return bytes per second of c = a + 3 b over arrays larger than caches: the best of five."""
    count = ARRAY[device.type] // 4
    a, b, c = (torch.ones(count, device=device) for _ in range(3))
    best = float("inf")
    for _ in range(_REPEATS):
        _wait(device)
        begin = time.perf_counter()
        torch.add(a, b, alpha=3, out=c)
        _wait(device)
        best = min(best, time.perf_counter() - begin)
    return 3 * 4 * count / best


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


@dataclass(slots=True)
class Reads:
    """Bytes that steps must read.

    These are all weights, except the embedding (of which a step reads a few rows) and experts that
    get no token, and the K/V of the positions that a window attends to but does not run.
    """

    weights: int = 0
    keys: int = 0
    forwards: int = 0

    @property
    def bytes_per_step(self) -> float:
        return (self.weights + self.keys) / max(self.forwards, 1)


@contextmanager
def reads_of(engine: Engine) -> Iterator[Reads]:
    """Count the reads of all steps in the `with` block; counting waits for the device."""
    model, reads = engine.model, Reads()
    if not isinstance(model, Denoiser):
        raise ValueError("bytes can be counted only for models of checkpoints")
    layers = [module for module in model.modules() if isinstance(module, SparseMLP)]
    embedding = 0 if model.output is model.embedding else _bytes(model.embedding)
    always = _bytes(model) - sum(_bytes(layer.experts) for layer in layers) - embedding
    position = position_bytes(model.spec.kv_shapes, model.dtype, engine.kv.form)
    run_step = BatchPlan.denoise

    def count(experts: Experts, _router: object, _args: object, chosen: Routing) -> None:
        reads.weights += len(chosen.ids_TK.unique()) * _bytes(experts) // experts.experts.rows

    def step(plan: BatchPlan, number: int, chunks: Any) -> Any:
        reads.forwards += 1
        reads.weights += always
        for s in plan.sequences:
            start, stop = s.policy.cache.window(s, s.step + number)
            reads.keys += (s.kv_stop - (stop - start)) * position * (2 if s.guided else 1)
        reads.keys += sum(chunk.start for chunk in chunks) * position
        return run_step(plan, number, chunks)

    graphs = engine.graphs
    engine.graphs = engine.slots.layout = None  # a replay would bypass the hooks
    hooks = [
        layer.get_submodule("router").register_forward_hook(partial(count, layer.experts))
        for layer in layers
    ]
    with patch.object(BatchPlan, "denoise", step):
        try:
            yield reads
        finally:
            engine.graphs, engine.slots.layout = graphs, None
            for hook in hooks:
                hook.remove()


def _bytes(module: torch.nn.Module) -> int:
    return sum(part.numel() * part.element_size() for part in module.parameters())
