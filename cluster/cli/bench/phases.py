"""Measures where an engine's time goes, by wrapping its parts from outside.

Time counts for the innermost phase only, so the phases add up to the whole.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import wraps
from itertools import pairwise
from typing import Any, Final
from unittest.mock import patch

import torch

from diffray.workers.batch_plan import BatchPlan
from diffray.workers.batch_state import BatchState
from diffray.workers.engine import Engine
from diffray.workers.graphs import Recorded

MODEL, CACHE, DECODE, HOST = "model", "cache", "decode", "host"
_MOST_MARKS: Final = 4096  # that are kept before the device is synchronized


@contextmanager
def phases_of(engine: Engine) -> Iterator["Phases"]:
    """Measure the phases of all that the engine does in the `with` block."""
    places: list[tuple[object, str, str]] = [
        *((engine.model, name, MODEL) for name in ("embed", "forward", "head", "confidence")),
        (engine.model, "expected_embedding", MODEL),
        (engine.kv, "attend", CACHE),
        (Recorded, "forward", MODEL),  # with the cache: a graph's parts cannot be told apart
        (Recorded, "choose", MODEL),
        (BatchPlan, "denoise", DECODE),
        (BatchPlan, "outcomes", DECODE),
        *((BatchPlan, name, HOST) for name in ("_place", "_plan_head")),
        (BatchState, "__init__", HOST),
    ]
    phases = Phases(on_device=engine.slots.device.type == "cuda")
    with ExitStack() as wrapped:
        for owner, name, phase in places:
            timed = phases.timed(phase, getattr(owner, name))
            wrapped.enter_context(patch.object(owner, name, timed))
        before = engine.forwards
        phases.start()
        yield phases
        phases.stop()
        phases.forwards = engine.forwards - before


class Phases:
    """Seconds by phase.

    On a GPU the marks are events in the stream, read at the end. Nothing waits in between, so the
    host runs ahead of the device as it does without measuring.
    """

    def __init__(self, *, on_device: bool) -> None:
        self.seconds = dict.fromkeys((MODEL, CACHE, DECODE, HOST), 0.0)
        self.forwards = 0
        self._on_device = on_device
        self._stack = [HOST]
        self._marks: list[tuple[str, Any]] = []  # a phase, and when it started

    def start(self) -> None:
        if self._on_device:
            torch.cuda.synchronize()
        self._mark(HOST)

    def stop(self) -> None:
        self._mark(HOST)
        self._fold()

    def timed(self, phase: str, inner: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(inner)
        def run(*args: Any, **kwargs: Any) -> Any:
            self._stack.append(phase)
            self._mark(phase)
            try:
                return inner(*args, **kwargs)
            finally:
                self._stack.pop()
                self._mark(self._stack[-1])

        return run

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
