"""Runs trial processes one after the other, until every variant has been tried.

If one crashes or hangs, the variant that it was trying is refused, and the next process continues.
"""

import json
import math
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
from typing import Any, Final, NamedTuple, Self

from tqdm.auto import tqdm

from diffray.components.config import Config
from diffray.kernels.trial import SELECTIONS, Selection
from diffray.kernels.variants import TORCH_VARIANT
from diffray.workers.bring_up.findings import Findings, GraphsOutcome
from diffray.workers.bring_up.trial_process import GRAPHS, OUTCOME, TrialPlan

_CHILD = "diffray.workers.bring_up.trial_process"
_ENDING_S = 3.0  # for a process to end after it was killed or has closed its output
_EXIT_S = 20.0  # for the latter while there is time, as it takes long on a busy machine
_TIME_UP = "the time is up"


class TimeLimits(NamedTuple):
    """Seconds of bring-up and its parts; including the end of a process they stay below 60."""

    budget: float = 32.0  # for all variants but the defaults, which are tried in any case
    limit: float = 50.0  # for everything, including whole steps with what was found right
    trial: float = 12.0  # for one trial, or to compile several ahead


# The limits if the ranks try sums and recordings together afterwards.
BEFORE_THE_GROUP: Final = TimeLimits(budget=11.0, limit=24.0)


class Trials:
    """The outcomes so far, and the plan for the rest."""

    def __init__(self, plan: TrialPlan, limits: TimeLimits) -> None:
        self._plan, self._limits = plan, limits
        self._last: dict[str, Any] = {}  # the last message of a process
        self.outcomes = list(plan.done)
        self.wrong: dict[Selection, str] = {}  # why these fail together; empty if they do not
        self.graphs: dict[Selection, GraphsOutcome] = {}
        self.untried = 0
        self.failed = ""  # why only torch's kernels can be used
        self.cut_off = False  # whether the time was up before everything was tried

    def run(self) -> None:
        """Start processes until one finishes, or fails at something that the next would repeat."""
        limit = time.monotonic() + self._limits.limit
        with tqdm(desc="kernels", unit="", disable=None) as bar:
            while (ending := self._one_process(limit, bar)) and self._continues(ending):
                pass
        self.cut_off = self.untried > 0 or ending == _TIME_UP
        own = [each for each in self.outcomes if each.variant != TORCH_VARIANT]
        if "defaults" in self.wrong and not self._right:
            self.failed = f"the default variants fail together: {self.wrong['defaults']}"
        elif not self._right:
            self.failed = f"the trials failed: {ending}"
        elif own and all(each.refused for each in own):
            self.failed = f"every variant is refused, the first because: {own[0].refused}"
        elif self._plan.graphs:
            untried = GraphsOutcome(f"they were not tried: {ending}")
            self.graphs = {each: self.graphs.get(each, untried) for each in self._right}

    @property
    def _right(self) -> list[Selection]:
        return [selection for selection, why in self.wrong.items() if not why]

    @property
    def selection(self) -> Selection:
        """Which of the right selections to use: the one with the fastest replays."""

        def seconds(selection: Selection) -> float:
            found = self.graphs.get(selection, GraphsOutcome())
            return math.inf if found.refused or found.replayed_s is None else found.replayed_s

        return min(self._right, key=seconds, default="fastest")

    def _one_process(self, limit: float, bar: Any) -> str:
        """Run a process to its end; return how it failed, empty if it finished."""
        plan = self._plan.model_copy(
            update={
                "done": tuple(self.outcomes),
                "selections": tuple(each for each in SELECTIONS if each not in self.wrong),
                "right": bool(self._right),
            }
        )
        self._last = {}
        with ChildProcess(_CHILD, plan) as process:
            while True:
                left = limit - time.monotonic()
                wait = self._limits.trial if self._last else left  # its start takes long
                try:
                    message = process.message(max(min(wait, left), 0.0))
                except TimeoutError:
                    if wait >= left:
                        self._last = {}
                        return _TIME_UP
                    return f"it did not end within {wait:g} s"
                if message is None:
                    return process.ending(min(limit - time.monotonic(), _EXIT_S))
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
            case {"combined": selection, "wrong": why}:
                self.wrong[selection] = why
            case {"recorded": selection, "graphs": found}:
                self.graphs[selection] = GRAPHS.validate_python(found)

    def _continues(self, ending: str) -> bool:
        """Refuse what a process was doing when it failed; return whether to start another."""
        match self._last:
            case {"begin": begun}:
                self.outcomes.append(replace(OUTCOME.validate_python(begun), refused=ending))
                self.untried -= 1
            case {"compiling": True}:
                self._plan = self._plan.model_copy(update={"compile_ahead": False})
            case {"combining": selection}:
                self.wrong[selection] = ending
                return "defaults" not in self.wrong and not self._right
            case {"recording": selection}:
                self.graphs[selection] = GraphsOutcome(ending)
                return "early" not in self.wrong and "defaults" not in self.wrong
            case {"outcome": _}:  # it ended because of this outcome
                pass
            case _:
                return False
        return True


def run_trials(plan: TrialPlan, limits: TimeLimits) -> Findings:
    """Try every variant; return the outcomes."""
    begin = time.monotonic()
    trials = Trials(plan.model_copy(update={"until": begin + limits.budget}), limits)
    trials.run()
    return Findings(
        outcomes=tuple(trials.outcomes),
        selection=trials.selection,
        conflicts={selection: why for selection, why in trials.wrong.items() if why},
        graphs=trials.graphs.get(trials.selection),
        untried=trials.untried,
        cut_off=trials.cut_off and len(trials.outcomes) > len(plan.done),
        seconds=time.monotonic() - begin,
        failed=trials.failed,
    )


class ChildProcess:
    """A trial process; it is killed on leaving, and ends by itself if this process dies."""

    def __init__(self, module: str, plan: Config) -> None:
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115  # closed on leaving
        # It must import the same modules as this process, wherever they come from.
        path = os.pathsep.join(filter(None, sys.path))
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", module],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            env=os.environ | {"PYTHONPATH": path},
            start_new_session=True,  # so that its own children are killed with it
        )
        assert self._process.stdin is not None and self._process.stdout is not None
        self._input, self._output = self._process.stdin, self._process.stdout
        self._lines: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        with suppress(BrokenPipeError):
            self._input.write(plan.model_dump_json().encode() + b"\n")
            self._input.flush()  # it stays open: its end ends the process

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        with suppress(subprocess.TimeoutExpired):  # a GPU driver may keep it from ending
            self._process.wait(_ENDING_S)
        self._reader.join(_ENDING_S)
        if self._reader.is_alive():  # it holds the lock of its file
            return
        for file in (self._input, self._output, self._errors):
            with suppress(BrokenPipeError):
                file.close()

    def _read(self) -> None:
        for line in self._output:
            if line.startswith(b"{") and line.endswith(b"}\n"):  # libraries may print too
                self._lines.put(line)
        self._lines.put(b"")

    def message(self, seconds: float) -> dict[str, Any] | None:
        """Wait for the next message; return None if there are no more."""
        try:
            line = self._lines.get(timeout=seconds)
        except queue.Empty:
            raise TimeoutError from None
        return json.loads(line) if line else None

    def ending(self, seconds: float = _ENDING_S) -> str:
        """Return how the process ended, and the last line of its errors."""
        seconds = max(seconds, _ENDING_S)
        try:
            code = self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            return f"it did not end within {seconds:g} s"
        self._errors.seek(0)
        lines = self._errors.read().decode(errors="replace").strip().splitlines()
        how = f"it crashed ({signal.Signals(-code).name})" if code < 0 else f"it ended ({code})"
        return f"{how}: {lines[-1][:200]}" if lines else how
