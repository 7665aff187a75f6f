"""The two processes of `diffray serve` without Ray: each ends what is left when the other dies."""

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import pytest

SLOW = 20.0  # seconds for what takes one, on a machine that does other things too
# A server that has started a process of another session, and thrown away its parent.
SERVER = """
import signal, subprocess, sys, time
from diffray.cluster.serve import supervisor
supervisor.LOST_S = supervisor.HURRY_S = 1.0
supervisor.SAME_S = {same}
with supervisor.supervised() as ending:
    subprocess.run(["sh", "-c", "setsid sleep 300 </dev/null >/dev/null 2>&1 & echo started $!"])
    def stop(): signal.signal(signal.SIGINT, lambda number, frame: ending.stopped.set())
    print("folder", ending.folder, flush=True)
    input()
    {body}
"""


@dataclass(frozen=True)
class Command:
    process: subprocess.Popen[str]
    orphan: int
    folder: Path
    server: int

    def tell(self, number: signal.Signals) -> None:
        os.kill(self.process.pid, number)

    def ends(self, status: int, *words: str) -> None:
        """Wait for its end, after which nothing is left; it has said so many sentences, so."""
        assert self.process.wait(SLOW) == status
        wait_until(lambda: not any(map(alive, (self.server, self.orphan))))
        wait_until(lambda: not self.folder.exists())
        assert self.process.stderr is not None
        lines = self.process.stderr.read().splitlines()
        assert len(lines) == len(words), lines
        for line, said in zip(lines, words, strict=True):
            assert line.startswith("diffray: ") and said in line


def alive(pid: int) -> bool:
    with suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False


def wait_until(holds: Callable[[], bool]) -> None:
    end = time.monotonic() + SLOW
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.02)


@contextmanager
def command(body: str, *before: str, same: float = 1.0) -> Iterator[Command]:
    """Run a server whose work is `body`; a signal is the same for so many seconds."""
    arguments = [*before, sys.executable, "-c", SERVER.format(body=body, same=same)]
    with subprocess.Popen(
        arguments,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None and process.stdin is not None
        words = process.stdout.readline().split() + process.stdout.readline().split()
        assert words[::2] == ["started", "folder"], words
        mine = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        found = Command(process, int(words[1]), Path(words[3]), int(mine[0]))
        assert alive(found.orphan) and found.folder.is_dir()
        process.stdin.write("go on\n")
        process.stdin.flush()
        try:
            yield found
        finally:
            for pid in (process.pid, found.server, found.orphan):
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)


FOR_EVER = "time.sleep(300)"
UNTIL_TOLD = "stop(); print('ready', flush=True); ending.stopped.wait()"
DEAF = (
    "stop(); print('ready', flush=True); ending.stopped.wait(); print('told', flush=True);"
    "time.sleep(300)"
)


def test_a_server_that_ends_by_itself_leaves_nothing() -> None:
    with command("pass") as ended:
        ended.ends(0)


def test_an_error_is_the_exit_status() -> None:
    with command("import typer; raise typer.Exit(3)") as ended:
        ended.ends(3)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("body", [FOR_EVER, UNTIL_TOLD])
def test_the_first_signal_is_a_clean_end(number: signal.Signals, body: str) -> None:
    with command(body) as told:
        told.tell(number)
        told.ends(0)


def test_the_second_signal_ends_what_does_not_end() -> None:
    with command(DEAF, same=0) as told:
        assert told.process.stdout is not None
        assert told.process.stdout.readline() == "ready\n"
        told.tell(signal.SIGINT)
        assert told.process.stdout.readline() == "told\n"
        told.tell(signal.SIGINT)
        told.ends(130)


def test_one_signal_that_is_sent_twice_is_one() -> None:
    with command(DEAF, same=SLOW) as told:
        assert told.process.stdout is not None
        assert told.process.stdout.readline() == "ready\n"
        told.tell(signal.SIGINT)
        assert told.process.stdout.readline() == "told\n"
        told.tell(signal.SIGINT)  # as timeout(1) does
        time.sleep(2)
        assert alive(told.server)
        told.tell(signal.SIGTERM)
        told.ends(143)


def test_a_closed_terminal_leaves_a_moment_to_finish() -> None:
    with command(DEAF) as told:
        told.tell(signal.SIGHUP)
        told.ends(129, "the terminal was closed")


def test_under_nohup_a_closed_terminal_is_nothing() -> None:
    with command(UNTIL_TOLD, "nohup") as told:
        told.tell(signal.SIGHUP)
        time.sleep(2)
        assert alive(told.server)
        told.tell(signal.SIGTERM)
        assert told.process.wait(SLOW) == 0


def test_a_server_that_is_killed_leaves_nothing() -> None:
    with command(FOR_EVER) as killed:
        os.kill(killed.server, signal.SIGKILL)
        killed.ends(137, "the server process was killed (SIGKILL)")


@pytest.mark.parametrize("body", [FOR_EVER, UNTIL_TOLD])
def test_a_server_whose_supervisor_is_killed_leaves_nothing(body: str) -> None:
    with command(body) as killed:
        killed.tell(signal.SIGKILL)
        words = () if body == UNTIL_TOLD else ("had not ended after 1 s",)
        killed.ends(-signal.SIGKILL, *words)


def test_a_failure_is_said_and_ends_a_server_that_hangs() -> None:
    with command(f"ending.failure = lambda: 'it is broken'; {FOR_EVER}") as failed:
        failed.ends(1, "it is broken")


@pytest.mark.parametrize(
    ("failure", "words"),
    [("raise supervisor.typer.Exit(1)", ()), ("os.kill(os.getpid(), 9)", ("killed (SIGKILL)",))],
)
def test_a_check_that_fails_ends_a_server_that_went_on_meanwhile(
    failure: str, words: tuple[str, ...]
) -> None:
    check = f"import os, typer; supervisor.say('diffray: it is wrong'); {failure}"
    body = f"with ending.unless_passed(lambda: exec({check!r}, globals()), ''): {FOR_EVER}"
    with command(body) as failed:
        failed.ends(1, "it is wrong", *words)


def test_a_check_that_passes_is_waited_for() -> None:
    """Even by an error, which comes second."""
    check = "lambda: time.sleep(0.5) or supervisor.say('diffray: checked')"
    fail = "supervisor.say('diffray: begun'); import typer; raise typer.Exit(3)"
    with command(f"with ending.unless_passed({check}, 'diffray: passed'): {fail}") as ended:
        ended.ends(3, "begun", "checked", "passed")


def test_a_server_that_takes_too_long_to_end_is_killed() -> None:
    with command(f"ending.limit_s = 1; {DEAF}") as told:
        assert told.process.stdout is not None
        assert told.process.stdout.readline() == "ready\n"
        told.tell(signal.SIGTERM)
        told.ends(1, "had not ended after 1 s and was killed")


def test_children_that_were_there_before_are_left_alone() -> None:
    """A shell may have started others, and then have replaced itself with this command."""
    script = 'sleep 300 </dev/null >/dev/null 2>&1 & echo $! >&2; exec "$@"'
    with command("pass", "bash", "-c", script, "bash") as ended:
        assert ended.process.wait(SLOW) == 0
        assert ended.process.stderr is not None
        bystander = int(re.findall(r"\d+", ended.process.stderr.read())[0])
        assert alive(bystander)
        os.kill(bystander, signal.SIGKILL)
