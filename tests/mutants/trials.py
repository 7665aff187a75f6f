"""Runs tests in copies of the tree, in forks of one process that has imported the libraries.

A fork, and every process that its tests start, imports the copy's diffray and nothing of this tree.
"""

import os
import shutil
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.mutants.rules import Rule

_OPTIONS = ("-x", "-q", "-m", "not long", "-p", "no:cacheprovider", "--hypothesis-seed=0")
_LOOK_S = 0.02


class Trial(NamedTuple):
    """Tests to run, after a fault if there is a rule; a run that exceeds the limit hangs."""

    tests: list[str]
    rule: Rule | None = None
    limit_s: float = 900.0


class Outcome(NamedTuple):
    trial: Trial
    failed: str | None  # the first failing test, or how the run ended without one
    seconds: float


def copy_tree(root: Path, to: Path) -> Path:
    """Copy the files that git tracks or would add, with their times of modification."""
    listed = ["git", "-C", str(root), "ls-files", "-coz", "--exclude-standard"]
    names = subprocess.run(listed, capture_output=True, text=True, check=True).stdout
    for name in filter(None, names.split("\0")):
        if os.path.lexists(root / name):
            (to / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(root / name, to / name, follow_symlinks=False)
    return to


def run_trials(trials: Sequence[Trial], tree: Path, copies: Sequence[Path]) -> Iterator[Outcome]:
    """Run trials, one at a time in each copy of the tree; yield their outcomes as they end."""
    waiting, free = deque(enumerate(trials, 1)), [*copies]
    running: dict[int, tuple[Trial, Path, float]] = {}  # by process id
    try:
        while waiting or running:
            while waiting and free:
                (number, trial), copy = waiting.popleft(), free.pop()
                if trial.rule is not None:
                    trial.rule.apply(copy)
                    # A time of its own: Python must not take another trial's bytecode for this.
                    os.utime(copy / trial.rule.file, (number, number))
                running[_start(copy, trial.tests)] = trial, copy, time.monotonic()
            time.sleep(_LOOK_S)
            for pid, (trial, copy, began) in list(running.items()):
                took = time.monotonic() - began
                ended = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
                if ended is None and took < trial.limit_s:
                    continue
                del running[pid]
                status, note = _end(pid), _note(copy)
                failed = note.read_text() if note.exists() else f"status {status}"
                if trial.rule is not None:
                    shutil.copy2(tree / trial.rule.file, copy / trial.rule.file)
                free.append(copy)
                yield Outcome(trial, "hung" if ended is None else failed if status else None, took)
    finally:
        for pid in running:
            _end(pid)


def _start(copy: Path, tests: Sequence[str]) -> int:
    """Run tests in a fork, and return its process id."""
    _note(copy).unlink(missing_ok=True)
    sys.stdout.flush()
    if pid := os.fork():
        return pid
    status: int = pytest.ExitCode.INTERNAL_ERROR
    try:
        os.setsid()
        for stream, path in enumerate((Path(os.devnull), copy.with_suffix(".log"))):
            os.dup2(os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC), stream)
        os.dup2(1, 2)
        here = Path.cwd()
        sys.path[:] = [str(copy), *(path for path in sys.path if Path(path).resolve() != here)]
        os.chdir(copy)
        os.environ["PYTHONPATH"] = str(copy)
        for name in [each for each in sys.modules if each.split(".")[0] in ("diffray", "tests")]:
            del sys.modules[name]
        named = [f"tests/{test}" for test in tests]
        status = pytest.main([*_OPTIONS, *named], plugins=[_Watch(_note(copy), tests)])
    finally:
        os._exit(status)


def _end(pid: int) -> int:
    """Kill what is left of a fork and of its children; return its exit code."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def _note(copy: Path) -> Path:
    return copy.with_suffix(".failed")


class _Watch:
    """A plugin of pytest that keeps the order of the files, and notes the first failure."""

    def __init__(self, note: Path, tests: Sequence[str]) -> None:
        self._note, self._files = note, [f"tests/{test.partition('::')[0]}" for test in tests]

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        items.sort(key=lambda item: self._files.index(item.nodeid.partition("::")[0]))

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.failed and not self._note.exists():
            self._note.write_text(report.nodeid)

    pytest_collectreport = pytest_runtest_logreport
