"""The two processes of `diffray serve` without Ray: each ends what is left when the other dies."""

import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from signal import SIGHUP, SIGINT, SIGKILL, SIGTERM, Signals, raise_signal
from typing import Any

import pytest

from diffray.cluster.serve.supervisor import interruptible
from tests.helpers.served import wait_until

SLOW = 20.0  # seconds for what takes one, on a machine that does other things too
# A server that has started a process of another session, and thrown away its parent.
SERVER = """
import subprocess, sys, time
from diffray.cluster.serve import supervisor
supervisor.LOST_S = supervisor.HURRY_S = 1.0
supervisor.SAME_S = {same}
with supervisor.supervised() as ending:
    subprocess.run(["sh", "-c", "setsid sleep 300 </dev/null >/dev/null 2>&1 & echo started $!"])
    signals = supervisor.interruptible(ending.stopped)
    stop = signals.__enter__
    input()
    {body}
"""


@dataclass(frozen=True)
class Command:
    process: subprocess.Popen[str]
    orphan: int
    server: int

    def tell(self, number: Signals) -> None:
        os.kill(self.process.pid, number)

    def says(self, word: str) -> None:
        assert self.process.stdout is not None
        assert self.process.stdout.readline() == f"{word}\n"

    def ends(self, status: int, *words: str) -> None:
        """Wait for its end, after which nothing is left; it has said so many sentences, so."""
        assert self.process.wait(SLOW) == status
        wait_until(lambda: not any(map(alive, (self.server, self.orphan))))
        assert self.process.stderr is not None
        lines = self.process.stderr.read().splitlines()
        assert len(lines) == len(words), lines
        for line, said in zip(lines, words, strict=True):
            assert line.startswith("diffray: ") and said in line


def alive(pid: int) -> bool:
    with suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False


@contextmanager
def command(body: str, *before: str, same: float = 1.0) -> Iterator[Command]:
    """Run a server whose work is `body`; a signal is the same for so many seconds."""
    arguments = [*before, sys.executable, "-c", SERVER.format(body=body, same=same)]
    with subprocess.Popen(
        arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None and process.stdin is not None
        word, orphan = process.stdout.readline().split()
        assert word == "started"
        mine = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        found = Command(process, int(orphan), int(mine[0]))
        assert alive(found.orphan)
        process.stdin.write("go on\n")
        process.stdin.flush()
        try:
            yield found
        finally:
            for pid in (process.pid, found.server, found.orphan):
                with suppress(ProcessLookupError):
                    os.kill(pid, SIGKILL)


FOR_EVER = "time.sleep(300)"
UNTIL_TOLD = "stop(); print('ready', flush=True); ending.stopped.wait()"
DEAF = (
    "stop(); print('ready', flush=True); ending.stopped.wait(); print('told', flush=True);"
    "time.sleep(300)"
)


def failing_check(failure: str) -> str:
    """Return a body that goes on while a check beside it fails."""
    check = f"import os, typer; supervisor.say('diffray: it is wrong'); {failure}"
    return f"with ending.unless_passed(lambda: exec({check!r}, globals()), ''): {FOR_EVER}"


# A check that passes is waited for even by an error, which comes second.
PASSING_CHECK = (
    "with ending.unless_passed(lambda: time.sleep(0.5) or supervisor.say('diffray: checked'), "
    "'diffray: passed'): supervisor.say('diffray: begun'); import typer; raise typer.Exit(3)"
)
# What the server does, the signal that the user's process gets, its status, and what it says.
ENDINGS = [
    ("pass", None, 0),
    ("import typer; raise typer.Exit(3)", None, 3),
    *((body, *end) for body in (FOR_EVER, UNTIL_TOLD) for end in ((SIGINT, 0), (SIGTERM, 0))),
    ("import os; os.kill(os.getpid(), 9)", None, 137, "server process was killed (SIGKILL)"),
    (DEAF, SIGHUP, 129, "the terminal was closed"),
    (FOR_EVER, SIGKILL, -SIGKILL, "had not ended after 1 s"),
    (UNTIL_TOLD, SIGKILL, -SIGKILL),
    (f"ending.failure = lambda: 'it is broken'; {FOR_EVER}", None, 1, "it is broken"),
    (f"ending.limit_s = 1; {DEAF}", SIGTERM, 1, "had not ended after 1 s and was killed"),
    (failing_check("raise supervisor.typer.Exit(1)"), None, 1, "it is wrong"),
    (failing_check("os.kill(os.getpid(), 9)"), None, 1, "it is wrong", "killed (SIGKILL)"),
    (PASSING_CHECK, None, 3, "begun", "checked", "passed"),
]


@pytest.mark.parametrize("ending", ENDINGS)
@pytest.mark.rotate(6)
def test_every_end_leaves_nothing_and_has_its_status(ending: Any) -> None:
    body, number, status, *words = ending
    with command(body) as told:
        if "'ready'" in body:
            told.says("ready")
        if number is not None:
            told.tell(number)
        told.ends(status, *words)


def test_the_second_signal_ends_what_does_not_end() -> None:
    with command(DEAF, same=0) as told:
        told.says("ready")
        told.tell(SIGINT)
        told.says("told")
        told.tell(SIGINT)
        told.ends(130)


def test_one_signal_that_is_sent_twice_is_one() -> None:
    with command(DEAF, same=SLOW) as told:
        told.says("ready")
        told.tell(SIGINT)
        told.says("told")
        told.tell(SIGINT)  # as timeout(1) does
        time.sleep(2)
        assert alive(told.server)
        told.tell(SIGTERM)
        told.ends(143)


def test_a_signal_may_come_while_its_event_is_locked() -> None:
    """As in the moment before a thread waits for it."""
    stopped = threading.Event()
    with interruptible(stopped):
        with stopped._cond:  # type: ignore[attr-defined]
            raise_signal(SIGINT)
        assert stopped.wait(SLOW)


def test_under_nohup_a_closed_terminal_is_nothing() -> None:
    with command(UNTIL_TOLD, "nohup") as told:
        told.tell(SIGHUP)
        time.sleep(2)
        assert alive(told.server)
        told.tell(SIGTERM)
        assert told.process.wait(SLOW) == 0


def test_children_that_were_there_before_are_left_alone() -> None:
    """A shell may have started others, and then have replaced itself with this command."""
    script = 'sleep 300 </dev/null >/dev/null 2>&1 & echo $! >&2; exec "$@"'
    with command("pass", "bash", "-c", script, "bash") as ended:
        assert ended.process.wait(SLOW) == 0
        assert ended.process.stderr is not None
        bystander = int(re.findall(r"\d+", ended.process.stderr.read())[0])
        assert alive(bystander)
        os.kill(bystander, SIGKILL)
