"""Runs trial processes one after the other, until every variant has been tried.

A process that crashes or hangs costs the variant that it was trying; the next one goes on after it.
"""

import json
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import suppress
from dataclasses import replace
from types import TracebackType
from typing import Any, NamedTuple, Self

from tqdm.auto import tqdm

from diffray.kernels.trial import Outcome
from diffray.workers.findings import Findings, GraphsOutcome
from diffray.workers.trial_process import GRAPHS, OUTCOME, Order

_CHILD = "diffray.workers.trial_process"


class Patience(NamedTuple):
    """How many seconds to wait."""

    budget: float = 45.0  # for everything but what must be tried in any case
    limit: float = 300.0  # for everything
    start: float = 120.0  # for a process to begin
    trial: float = 30.0  # for one trial


class Trials:
    """The outcomes so far, and the order for what is left."""

    def __init__(self, order: Order, patience: Patience) -> None:
        self._order, self._patience = order, patience
        self._last: dict[str, Any] = {}  # the last message of a process
        self.outcomes: list[Outcome] = []
        self.graphs: GraphsOutcome | None = None
        self.untried = 0
        self.apart = ""  # why the fastest variants cannot be used together
        self.together = False  # whether what is left of them can
        self.failed = ""  # why there are only torch's kernels

    def run(self) -> None:
        """Start processes as long as each gets further than the one before."""
        limit = time.monotonic() + self._patience.limit
        with tqdm(desc="kernels", unit="", disable=None) as bar:
            while (ending := self._one_process(limit, bar)) and self._goes_on(ending):
                pass
        if not self.together and not self.failed:
            self.failed = f"others could not be tried: {ending}"

    def _one_process(self, limit: float, bar: Any) -> str:
        """Run a process to its end; return how it ended, empty if nothing is left to try."""
        order = self._order.model_copy(update={"done": tuple(self.outcomes)})
        self._last = {}
        with _Process(order) as process:
            while True:
                wait = self._patience.trial if self._last else self._patience.start
                left = limit - time.monotonic()
                try:
                    message = process.message(max(min(wait, left), 0.0))
                except TimeoutError:
                    if wait >= left:
                        self._last = {}
                        return "the time is up"
                    return f"no end after {wait:g} s"
                if message is None:
                    return process.ending()
                self._last = message
                if "end" in message:
                    return ""
                self._note(message, bar)

    def _note(self, message: dict[str, Any], bar: Any) -> None:
        match message:
            case {"total": total}:
                self.untried = total
                bar.reset(len(self.outcomes) + total)
                bar.update(len(self.outcomes))
            case {"skipped": True}:
                self.untried -= 1
                bar.update()
            case {"outcome": outcome}:
                self.outcomes.append(OUTCOME.validate_python(outcome))
                self.untried -= 1
                bar.update()
            case {"combined": wrong}:
                self._note_combined(wrong)
            case {"graphs": found}:
                self.graphs = GRAPHS.validate_python(found)

    def _note_combined(self, wrong: str) -> None:
        """Give up the fastest variants if they are wrong, then the defaults too."""
        self.together = not wrong
        if wrong and not self.apart:
            self.apart = wrong
            self._order = self._order.model_copy(update={"defaults": True})
        elif wrong:
            self.failed = f"they are wrong together: {wrong}"

    def _goes_on(self, ending: str) -> bool:
        """Blame what a process was doing when it ended; return whether another can do the rest."""
        match self._last:
            case {"begin": begun}:
                self.outcomes.append(replace(OUTCOME.validate_python(begun), refused=ending))
                self.untried -= 1
            case {"compiling": True}:
                self._order = self._order.model_copy(update={"ahead": False})
            case {"combining": True}:
                self._note_combined(ending)
                return not self.failed
            case {"recording": True}:
                self.graphs = GraphsOutcome(ending)
                return False
            case {"outcome": _}:  # it ended because of that one
                pass
            case _:
                return False
        return True


def try_kernels(order: Order, patience: Patience) -> Findings:
    """Return what became of every variant."""
    begin = time.monotonic()
    trials = Trials(order.model_copy(update={"until": begin + patience.budget}), patience)
    trials.run()
    return Findings(
        outcomes=tuple(trials.outcomes),
        graphs=trials.graphs,
        untried=trials.untried,
        apart=trials.apart,
        seconds=time.monotonic() - begin,
        failed=trials.failed,
    )


class _Process:
    """A trial process; it is ended on leaving, and by itself if this process dies."""

    def __init__(self, order: Order) -> None:
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115  # closed on leaving
        # It imports what this process imports, wherever that comes from.
        path = os.pathsep.join(filter(None, sys.path))
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", _CHILD],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            env=os.environ | {"PYTHONPATH": path},
        )
        assert self._process.stdin is not None and self._process.stdout is not None
        self._input, self._output = self._process.stdin, self._process.stdout
        self._lines: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        self._reader = threading.Thread(target=self._read)
        self._reader.start()
        with suppress(BrokenPipeError):
            self._input.write(order.model_dump_json().encode() + b"\n")
            self._input.flush()  # it stays open: its end ends the process

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._process.kill()
        self._process.wait()
        self._reader.join()
        for file in (self._input, self._output, self._errors):
            with suppress(BrokenPipeError):
                file.close()

    def _read(self) -> None:
        for line in self._output:
            self._lines.put(line)
        self._lines.put(b"")

    def message(self, seconds: float) -> dict[str, Any] | None:
        """Wait for the next message; None: there will be no more."""
        try:
            line = self._lines.get(timeout=seconds)
        except queue.Empty:
            raise TimeoutError from None
        return json.loads(line) if line.endswith(b"\n") else None

    def ending(self) -> str:
        """Return how the process ended, and the last that it wrote of it."""
        code = self._process.wait()
        self._errors.seek(0)
        lines = self._errors.read().decode(errors="replace").strip().splitlines()
        how = f"it crashed ({signal.Signals(-code).name})" if code < 0 else f"it ended ({code})"
        return f"{how}: {lines[-1][:200]}" if lines else how
