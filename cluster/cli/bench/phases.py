"""Where an engine's time goes: its parts are wrapped from outside while one looks.

The engine has no code for it. Time belongs to the innermost phase it was spent in, so the phases
add up to the whole.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import wraps
from itertools import pairwise
from typing import Any, Final, Self

import torch

from diffray.components.mesh import Mesh
from diffray.workers.batch_plan import BatchPlan
from diffray.workers.batch_state import BatchState
from diffray.workers.engine import Engine
from diffray.workers.graphs import Recorded

MODEL, CACHE, DECODE, HOST, COMMUNICATION = "model", "cache", "decode", "host", "communication"
_MOST_MARKS: Final = 4096  # after so many the device is waited for


class Phases:
    """Seconds by phase of all that the engine does inside the `with` block.

    On a GPU the marks are events in the stream, read at the end. Nothing waits in between, so the
    host runs ahead as it does unobserved.
    """

    def __init__(self, engine: Engine) -> None:
        self.seconds: dict[str, float] = dict.fromkeys((MODEL, CACHE, DECODE, HOST), 0.0)
        if engine.mesh.size > 1:
            self.seconds[COMMUNICATION] = 0.0
        self.forwards = 0
        self._engine = engine
        self._on_device = engine.slots.device.type == "cuda"
        self._stack = [HOST]
        self._marks: list[tuple[str, Any]] = []  # from this moment on, time is of this phase
        self._wrapped = ExitStack()

    def __enter__(self) -> Self:
        engine = self._engine
        places: list[tuple[object, str, str]] = [
            *((engine.model, name, MODEL) for name in ("embed", "forward", "head", "confidence")),
            (engine.model, "expected_embedding", MODEL),
            (engine.kv, "attend", CACHE),
            (Recorded, "forward", MODEL),  # with the cache: a graph's parts cannot be told apart
            (Recorded, "choose", MODEL),
            (BatchPlan, "denoise", DECODE),
            (BatchPlan, "outcomes", DECODE),
            *((BatchPlan, name, HOST) for name in ("_place", "_ask")),
            (BatchState, "__init__", HOST),
        ]
        if engine.mesh.size > 1:
            places += [(Mesh, name, COMMUNICATION) for name in ("all_reduce", "all_gather")]
        for owner, name, phase in places:
            self._wrapped.enter_context(replaced(owner, name, self._timed(phase)))
        self.forwards = -engine.forwards
        if self._on_device:
            torch.cuda.synchronize()
        self._mark(HOST)
        return self

    def __exit__(self, *_: object) -> None:
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
        moment: Any = time.perf_counter()
        if self._on_device:
            moment = torch.cuda.Event(enable_timing=True)
            moment.record()
        self._marks.append((phase, moment))
        if len(self._marks) > _MOST_MARKS:
            self._fold()

    def _fold(self) -> None:
        if self._on_device:
            torch.cuda.synchronize()
        for (phase, begin), (_, end) in pairwise(self._marks):
            took = begin.elapsed_time(end) / 1e3 if self._on_device else end - begin
            self.seconds[phase] += took
        del self._marks[:-1]


@contextmanager
def replaced(
    owner: object, name: str, wrap: Callable[[Callable[..., Any]], Callable[..., Any]]
) -> Iterator[None]:
    """Wrap a method of a class, or of one object, until the block ends."""
    own, inner = name in vars(owner), getattr(owner, name)
    setattr(owner, name, wrap(inner))
    try:
        yield
    finally:
        if own:
            setattr(owner, name, inner)
        else:
            delattr(owner, name)
