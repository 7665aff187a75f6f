"""How near a step is to what memory allows: the bytes it must read, over the measured bandwidth."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final
from unittest.mock import patch

import torch

from diffray.components.denoiser import Denoiser
from diffray.components.experts import Experts
from diffray.workers.batch_plan import BatchPlan
from diffray.workers.engine import Engine

ARRAY: Final = {"cpu": 1 << 28, "cuda": 1 << 30}  # bytes: far more than any cache
_REPEATS: Final = 5


def memory_bandwidth(device: torch.device) -> float:
    """Return bytes per second of c = a + 3 b over arrays that no cache holds: the best of five."""
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

    These are all weights but the embedding (of which a step reads a few rows) and the experts to
    which no token goes, and the K/V of positions that a window sees and does not itself run.
    """

    weights: int = 0
    keys: int = 0
    forwards: int = 0

    @property
    def bytes_per_step(self) -> float:
        return (self.weights + self.keys) / max(self.forwards, 1)


@contextmanager
def reads_of(engine: Engine) -> Iterator[Reads]:
    """Count the reads of all steps inside the `with` block; it waits for the device: no timing."""
    model, reads = engine.model, Reads()
    if not isinstance(model, Denoiser):
        raise ValueError("bytes can be counted of checkpoints' models only")
    layers = [module for module in model.modules() if isinstance(module, Experts)]
    embedding = 0 if model.output is model.embedding else _bytes(model.embedding)
    always = _bytes(model) - sum(map(_bytes, layers)) - embedding
    spec = model.spec
    position = 2 * spec.num_layers * spec.num_kv_heads * spec.head_dim * model.dtype.itemsize
    run_experts, run_step = Experts.forward, BatchPlan.denoise

    def experts(layer: Experts, x_TH: Any, ids_TK: Any, weights_TK: Any) -> Any:
        reads.weights += len(ids_TK.unique()) * _bytes(layer) // layer.experts.rows
        return run_experts(layer, x_TH, ids_TK, weights_TK)

    def step(plan: BatchPlan, number: int, chunks: Any) -> Any:
        reads.forwards += 1
        reads.weights += always
        for s in plan.sequences:
            start, stop = s.policy.cache.window(s, s.step + number)
            reads.keys += (s.kv_stop - (stop - start)) * position * (2 if s.guided else 1)
        reads.keys += sum(chunk.start for chunk in chunks) * position
        return run_step(plan, number, chunks)

    graphs = engine.graphs
    engine.graphs = engine.slots.layout = None  # a replay calls nothing that could be counted
    with patch.object(Experts, "forward", experts), patch.object(BatchPlan, "denoise", step):
        try:
            yield reads
        finally:
            engine.graphs, engine.slots.layout = graphs, None


def _bytes(module: torch.nn.Module) -> int:
    return sum(part.numel() * part.element_size() for part in module.parameters())
