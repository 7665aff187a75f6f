"""How near a step is to what memory allows: the bytes it must read, over the measured bandwidth."""

import time
from contextlib import ExitStack
from typing import Any, Final, Self

import torch

from diffray.cluster.cli.bench.phases import replaced
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


class Reads:
    """Counts what steps must read inside the `with` block; it waits for the device, so no timing.

    Counted are all weights but the embedding (of which a step reads a few rows) and the experts to
    which no token goes, and the K/V of the positions that a window sees and does not itself run.
    """

    def __init__(self, engine: Engine) -> None:
        model = engine.model
        if not isinstance(model, Denoiser):
            raise ValueError("bytes can be counted of checkpoints' models only")
        self.weights = self.keys = self.forwards = 0
        self._engine = engine
        experts = [module for module in model.modules() if isinstance(module, Experts)]
        routed = sum(_bytes(p) for module in experts for p in module.parameters())
        embedding = 0 if model.output is model.embedding else _bytes(model.embedding.weight_VH)
        self._always = sum(map(_bytes, model.parameters())) - routed - embedding
        spec = model.spec
        self._per_position = (
            2 * spec.num_layers * spec.num_kv_heads * spec.head_dim * model.dtype.itemsize
        )
        self._graphs = engine.graphs
        self._wrapped = ExitStack()

    @property
    def bytes_per_step(self) -> float:
        return (self.weights + self.keys) / max(self.forwards, 1)

    def __enter__(self) -> Self:
        # A replay calls nothing that could be counted.
        self._engine.graphs = self._engine.slots.layout = None
        self._wrapped.enter_context(replaced(Experts, "forward", self._count_experts))
        self._wrapped.enter_context(replaced(BatchPlan, "denoise", self._count_step))
        return self

    def __exit__(self, *_: object) -> None:
        self._wrapped.close()
        self._engine.graphs, self._engine.slots.layout = self._graphs, None

    def _count_experts(self, inner: Any) -> Any:
        def forward(experts: Experts, x_TH: Any, ids_TK: Any, weights_TK: Any) -> Any:
            here = experts.experts
            chosen = ids_TK.unique()
            touched = int(((chosen >= here.start) & (chosen < here.stop)).sum())
            size = sum(map(_bytes, experts.parameters())) // (here.stop - here.start)
            self.weights += touched * size
            return inner(experts, x_TH, ids_TK, weights_TK)

        return forward

    def _count_step(self, inner: Any) -> Any:
        def denoise(plan: BatchPlan, step: int, chunks: Any) -> Any:
            self.forwards += 1
            self.weights += self._always
            for s in plan.sequences:
                start, stop = s.policy.cache.window(s, s.step + step)
                seen = s.kv_stop - (stop - start)
                self.keys += seen * self._per_position * (2 if s.guided else 1)
            self.keys += sum(chunk.start for chunk in chunks) * self._per_position
            return inner(plan, step, chunks)

        return denoise


def _bytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()
