"""Runs check processes one after the other, until every kernel has been checked.

If one crashes or hangs, the kernel that it was checking is refused, and the next process goes on.
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
from types import TracebackType
from typing import Any, NamedTuple, Self

from diffray.components.config import Config
from diffray.workers.bring_up.check import CheckPlan
from diffray.workers.bring_up.findings import Findings

_CHILD = "diffray.workers.bring_up.check"
_ENDING_S = 3.0  # for a process to end after it was killed or has closed its output


class TimeLimits(NamedTuple):
    """Seconds; including the end of a process they stay below 60."""

    everything: float = 50.0
    one: float = 20.0  # for one kernel, one stage, or the start of a process


def run_check(plan: CheckPlan, limits: TimeLimits) -> Findings:
    """Check every kernel; return what is refused."""
    begin = time.monotonic()
    check = Check(plan, limits, begin + limits.everything)
    while check.goes_on():
        pass
    return Findings(
        refused=check.refused,
        graphs=check.graphs,
        late=check.late,
        seconds=time.monotonic() - begin,
        failed=check.failed,
    )


class Check:
    """What was found so far."""

    def __init__(self, plan: CheckPlan, limits: TimeLimits, until: float) -> None:
        self._plan, self._patience_s, self._until = plan, limits.one, until
        self._doing = ""  # the kernel or stage that a process has begun last
        self.refused: dict[str, str] = {}
        self.graphs: str | None = None
        self.failed = ""
        self.late = False  # whether there was no time for graphs

    def goes_on(self) -> bool:
        """Run a process for what is left; return whether to start another."""
        self._doing = ""
        self._plan = self._plan.model_copy(update={"refused": self.refused})
        with ChildProcess(_CHILD, self._plan) as process:
            ending = self._end_of(process)
        if not ending or self.failed:
            return False
        late = time.monotonic() >= self._until
        match self._doing:
            case "graphs":
                self.graphs, self.late = ending, late
            case "compiling" if self._plan.ahead and not late:
                self._plan = self._plan.model_copy(update={"ahead": False})
                return True
            case "" | "compiling" | "together":
                self.failed = f"the check failed: {ending}"
            case kernel if late:
                self.failed = f"the check failed at {kernel}: {ending}"
            case kernel:
                self.refused.setdefault(kernel, ending)
                return True
        return False

    def _end_of(self, process: "ChildProcess") -> str:
        """Note a process's messages until it ends; return how it failed, empty if it finished."""
        while True:
            wait = max(min(self._patience_s, self._until - time.monotonic()), 0.0)
            try:
                message = process.message(wait)
            except TimeoutError:
                return f"it did not end within {wait:.0f} s"
            match message:
                case None:
                    return process.ending()
                case {"begin": doing}:
                    self._doing = doing
                case {"refused": kernel, "why": why}:
                    self.refused[kernel] = why
                case {"failed": why}:
                    self.failed = why
                case {"graphs": why}:
                    self.graphs = why
                case {"end": True}:
                    return ""


class ChildProcess:
    """A check process; it is killed on leaving, and ends by itself if this process dies."""

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

    def ending(self) -> str:
        """Return how the process ended, and the last line of its errors."""
        try:
            code = self._process.wait(_ENDING_S)
        except subprocess.TimeoutExpired:
            return f"it did not end within {_ENDING_S:g} s"
        self._errors.seek(0)
        lines = self._errors.read().decode(errors="replace").strip().splitlines()
        how = f"it crashed ({signal.Signals(-code).name})" if code < 0 else f"it ended ({code})"
        return f"{how}: {lines[-1][:200]}" if lines else how
