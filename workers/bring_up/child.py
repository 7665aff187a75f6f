"""Runs check processes one after the other, until every kernel has been checked.

If one crashes or hangs, the kernel that it was checking is refused, and the next process goes on.
"""

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from typing import Any, NamedTuple

from diffray.workers.bring_up.check import CheckPlan
from diffray.workers.bring_up.findings import Findings

_CHILD = "diffray.workers.bring_up.check"
_LOOK_S = 0.05  # between looks at a process
_ENDING_S = 3.0  # for a process to end after it was killed: a GPU driver may keep it from ending


class TimeLimits(NamedTuple):
    """Seconds; including the end of a process they stay below 60."""

    everything: float = 50.0
    one: float = 20.0  # for one kernel or one stage


class Ended(NamedTuple):
    """A process that has ended: what it said, and how it failed, empty if it finished."""

    messages: list[dict[str, Any]]
    failure: str


def run_check(plan: CheckPlan, limits: TimeLimits) -> Findings:
    """Check every kernel; return what is refused."""
    begin = time.monotonic()
    until = begin + limits.everything
    refused, failed = dict[str, str](), ""
    while True:
        process = run_process(plan.model_copy(update={"refused": refused}), limits.one, until)
        doing, failure = "", process.failure
        for message in process.messages:
            match message:
                case {"begin": kernel_or_stage}:
                    doing = kernel_or_stage
                case {"refused": kernel, "why": why}:
                    refused[kernel] = why
                case {"failed": why}:
                    failed = why
        late = time.monotonic() >= until
        if not failure or failed:
            break
        if doing == "compiling" and plan.ahead and not late:
            plan = plan.model_copy(update={"ahead": False})
        elif doing in ("", "compiling", "together"):
            failed = f"the check failed: {failure}"
        elif late:
            failed = f"the check failed at {doing}: {failure}"
        else:
            refused.setdefault(doing, failure)
    return Findings(refused=refused, seconds=time.monotonic() - begin, failed=failed)


def run_process(plan: CheckPlan, patience_s: float, until: float) -> Ended:
    """Run a process until it has ended; kill it, and its children, if it hangs or is late."""
    # It must import the same modules as this process, wherever they come from.
    path = os.pathsep.join(filter(None, sys.path))
    # Files, because a pipe ends only with the last process that holds it.
    with tempfile.TemporaryFile() as output, tempfile.TemporaryFile() as errors:
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", _CHILD],
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=errors,
            env=os.environ | {"PYTHONPATH": path},
            start_new_session=True,
        )
        assert process.stdin is not None
        with suppress(BrokenPipeError), process.stdin:
            process.stdin.write(plan.model_dump_json().encode() + b"\n")
        try:
            failure = _watch(process, output.fileno(), patience_s, until)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            with suppress(subprocess.TimeoutExpired):
                process.wait(_ENDING_S)
        output.seek(0)
        errors.seek(0)
        lines = [*output]  # libraries may print too
        messages = [json.loads(line) for line in lines if line[:1] == b"{" and line[-2:] == b"}\n"]
        if {"end": True} in messages:
            return Ended(messages, "")
        last = errors.read().decode(errors="replace")
        return Ended(messages, failure or _ending(process.returncode, last))


def _watch(process: "subprocess.Popen[bytes]", output: int, patience_s: float, until: float) -> str:
    """Wait until a process has ended; return why it should be killed, empty if it has ended."""
    size, wait, since = 0, 0.0, time.monotonic()
    while process.poll() is None:
        now, grown = time.monotonic(), os.fstat(output).st_size
        if grown > size:  # it has begun with something else
            size, since = grown, now
        wait = min(patience_s, max(until - since, 0.0))
        if now - since > wait:
            return f"it did not end within {wait:.0f} s"
        time.sleep(_LOOK_S)
    return ""


def _ending(code: int | None, errors: str) -> str:
    """Return how a process ended that did not finish, and the last line of its errors."""
    how = f"it ended ({code})"
    if code is not None and code < 0:
        how = f"it crashed ({signal.Signals(-code).name})"
    lines = errors.strip().splitlines()
    return f"{how}: {lines[-1][:200]}" if lines else how
