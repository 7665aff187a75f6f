"""Where an engine's time goes, measured from outside: its parts are wrapped while one looks.

Nothing of this is in the engine: outside the `with` block it runs as it is. A time belongs to the
innermost phase it was spent in, so that the phases add up to the whole.
"""

import time
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import wraps
from itertools import pairwise
from types import TracebackType
from typing import Any, Final, Protocol, Self

import torch

from diffray.components.mesh import Mesh
from diffray.workers.batch_plan import BatchPlan
from diffray.workers.batch_state import BatchState
from diffray.workers.engine import Engine
from diffray.workers.graphs import Recorded

MODEL, CACHE, DECODE, HOST, COMMUNICATION = "model", "cache", "decode", "host", "communication"
MEANINGS: Final = {
    MODEL: "embedding, layers, head and its best tokens, without the attention on the cache",
    CACHE: "turning heads, storing K/V, and the attention that reads them",
    DECODE: "from confidences to accepted tokens, and the copy of the outcome to the host",
    HOST: "admission, planning, reports, text",
    COMMUNICATION: "collectives between ranks",
}
_OPEN: Final = 4096  # marks after which the device is waited for


class Clock(Protocol):
    """Marks moments and tells the seconds between two."""

    def mark(self) -> Any: ...
    def wait(self) -> None: ...
    def seconds(self, begin: Any, end: Any) -> float: ...


class HostClock:
    """For the CPU, where work is done when the call returns."""

    def mark(self) -> float:
        return time.perf_counter()

    def wait(self) -> None:
        pass

    def seconds(self, begin: float, end: float) -> float:
        return end - begin


class DeviceClock:
    """For CUDA: events in the stream, read once the device has passed them all.

    Nothing waits in between, so the phases overlap on the host as they do without being watched; a
    time in which the device waits for the host belongs to the phase that keeps it waiting.
    """

    def mark(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def wait(self) -> None:
        torch.cuda.synchronize()

    def seconds(self, begin: torch.cuda.Event, end: torch.cuda.Event) -> float:
        return float(begin.elapsed_time(end)) / 1e3


class Phases:
    """Seconds by phase of everything that the engine does inside the `with` block."""

    def __init__(self, engine: Engine) -> None:
        self.seconds: dict[str, float] = dict.fromkeys((MODEL, CACHE, DECODE, HOST), 0.0)
        if engine.mesh.size > 1:
            self.seconds[COMMUNICATION] = 0.0
        self.forwards = 0
        self._engine = engine
        on_device = engine.slots.device.type == "cuda"
        self._clock: Clock = DeviceClock() if on_device else HostClock()
        self._stack = [HOST]
        self._marks: list[tuple[str, Any]] = []  # from this moment on, time is of this phase
        self._wrapped = ExitStack()

    def __enter__(self) -> Self:
        engine = self._engine
        places: list[tuple[object, str, str]] = [
            (engine.model, "embed", MODEL),
            (engine.model, "forward", MODEL),
            (engine.model, "head", MODEL),
            (engine.model, "confidence", MODEL),
            (engine.model, "expected_embedding", MODEL),
            (engine.kv, "attend", CACHE),
            (Recorded, "forward", MODEL),  # what a graph reads of the cache is not told apart
            (Recorded, "choose", MODEL),
            (BatchPlan, "denoise", DECODE),
            (BatchPlan, "outcomes", DECODE),
            (BatchPlan, "_place", HOST),
            (BatchState, "__init__", HOST),
            (BatchPlan, "_ask", HOST),
        ]
        if engine.mesh.size > 1:
            places += [(Mesh, name, COMMUNICATION) for name in ("all_reduce", "all_gather")]
        for owner, name, phase in places:
            self._wrapped.enter_context(replaced(owner, name, self._timed(phase)))
        self.forwards = -engine.forwards
        self._clock.wait()
        self._mark(HOST)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._mark(HOST)
        self._fold()
        self.forwards += self._engine.forwards
        self._wrapped.close()

    def _timed(self, phase: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        def wrap(inner: Callable[..., Any]) -> Callable[..., Any]:
            @wraps(inner)
            def timed(*args: Any, **kwargs: Any) -> Any:
                self._stack.append(phase)
                self._mark(phase)
                try:
                    return inner(*args, **kwargs)
                finally:
                    self._stack.pop()
                    self._mark(self._stack[-1])

            return timed

        return wrap

    def _mark(self, phase: str) -> None:
        self._marks.append((phase, self._clock.mark()))
        if len(self._marks) > _OPEN:
            self._fold()

    def _fold(self) -> None:
        self._clock.wait()
        for (phase, begin), (_, end) in pairwise(self._marks):
            self.seconds[phase] += self._clock.seconds(begin, end)
        del self._marks[:-1]


def replaced(
    owner: object, name: str, wrap: Callable[[Callable[..., Any]], Callable[..., Any]]
) -> AbstractContextManager[None]:
    """Wrap a method of a class, or of one object, until the block ends."""

    @contextmanager
    def swap() -> Any:
        mine = name in vars(owner)
        inner = getattr(owner, name)
        setattr(owner, name, wrap(inner))
        try:
            yield
        finally:
            if mine:
                setattr(owner, name, inner)
            else:
                delattr(owner, name)

    return swap()
