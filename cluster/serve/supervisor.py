"""`diffray serve` as two processes: if one dies, the other cleans up.

The process that the user started, the supervisor, waits for signals and for its child, the server,
which does all the work. The server has its own session, so a terminal's signals reach only the
supervisor, not Ray. Both adopt orphans among their descendants, so each can end
everything it started, and nothing else, by killing its children until it has none.
"""

import ctypes
import math
import os
import signal
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Set
from contextlib import contextmanager, suppress
from typing import NoReturn

import typer

from diffray.workers.process import children

LOST_S = 8.0  # seconds for running requests after the terminal was closed or the supervisor died
HURRY_S = 2.0  # seconds for the server to leave a running cluster after the second Ctrl-C
SAME_S = 0.3  # seconds within which a repeated signal counts once: timeout(1) sends each twice
_CHECK_S = 1.0
_KILL_S = 5.0  # seconds until a killed process is gone, unless it is stuck in the kernel
_PR_SET_CHILD_SUBREAPER = 36


@contextmanager
def supervised() -> Iterator["Ending"]:
    """Run the body in a child process; this one waits for it and exits with its status.

    SIGINT asks the child to end, and kills it unless it handles the signal.
    """
    signals = {signal.SIGINT, signal.SIGTERM, signal.SIGCHLD}
    if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:  # nohup ignores it
        signals.add(signal.SIGHUP)
    before = signal.pthread_sigmask(signal.SIG_BLOCK, signals)
    _adopt_orphans()
    others = children()  # children of a shell that replaced itself with this command
    supervisor = os.getpid()
    server = os.fork()
    if server:
        try:
            status = _Supervisor(server, signals).run()
            _kill_descendants(others)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        raise SystemExit(status)
    os.setsid()
    _adopt_orphans()
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, before)
    ending = Ending(supervisor)
    threading.Thread(target=ending.watch, name="ending", daemon=True).start()
    with _ends_with(_exit):
        yield ending


@contextmanager
def interruptible(stopped: threading.Event) -> Iterator[None]:
    """Make SIGINT, from the supervisor, set an event; outside the block it ends the process.

    The same for SIGTERM, which may be sent to all processes and would make Ray exit. Another thread
    sets the event, whose lock the interrupted one may hold.
    """

    def stop(*_: object) -> None:
        threading.Thread(target=stopped.set).start()

    numbers = (signal.SIGINT, signal.SIGTERM)
    before = [signal.signal(each, stop) for each in numbers]
    try:
        yield
    finally:
        for each, handler in zip(numbers, before, strict=True):
            signal.signal(each, handler)


@contextmanager
def _ends_with(end: Callable[[int], NoReturn]) -> Iterator[None]:
    """End this process with the status that the body's outcome means for a command."""
    status = 1
    try:
        yield
        status = 0
    except typer.Exit as given:
        status = given.exit_code
    except BaseException:
        traceback.print_exc()
    finally:
        end(status)


class _Supervisor:
    """Waits for the server to end, and forwards signals."""

    def __init__(self, server: int, signals: set[signal.Signals]) -> None:
        self._server, self._signals = server, signals
        self._received: list[signal.Signals] = []
        self._received_at = -math.inf
        self._deadline = math.inf

    def run(self) -> int:
        """Return the exit status, once the server has ended or was killed."""
        while (code := self._ended()) is None:
            left = self._deadline - time.monotonic()
            if left <= 0:
                with suppress(ProcessLookupError):
                    os.kill(self._server, signal.SIGKILL)
            found = signal.sigtimedwait(self._signals, min(max(left, 0.1), _CHECK_S))
            if found is not None and found.si_signo != signal.SIGCHLD:
                self._forward(signal.Signals(found.si_signo))
        return self._status(code)

    def _ended(self) -> int | None:
        """Return the server's exit code, if it has one; it is negative for a signal."""
        with suppress(ChildProcessError):
            while (found := os.waitpid(-1, os.WNOHANG))[0]:
                if found[0] == self._server:
                    return os.waitstatus_to_exitcode(found[1])
        return None

    def _forward(self, number: signal.Signals) -> None:
        """Ask the server to end; kill it soon after a second signal."""
        now = time.monotonic()
        if number in self._received and now - self._received_at < SAME_S:
            return
        if number == signal.SIGHUP:
            say(
                "diffray: the terminal was closed, so the server ends; "
                f"running requests have {LOST_S:g} s to finish"
            )
            limit = LOST_S
        else:
            limit = HURRY_S if self._received else math.inf
        self._received.append(number)
        self._received_at, self._deadline = now, min(self._deadline, now + limit)
        with suppress(ProcessLookupError):
            os.kill(self._server, signal.SIGINT)

    def _status(self, code: int) -> int:
        if signal.SIGHUP in self._received or len(self._received) > 1:
            return 128 + self._received[-1]
        if self._received and -code in (signal.SIGINT, *self._received):
            return 0  # no requests to finish yet
        if code >= 0:
            return code
        name = signal.Signals(-code).name
        say(f"diffray: the server process was killed ({name}); everything it started was ended")
        return 128 - code


class Ending:
    """Reasons for the server process to end."""

    def __init__(self, supervisor: int) -> None:
        self.stopped = threading.Event()  # set when the server should end
        self.limit_s = math.inf  # seconds that it has from then on
        self.failure: Callable[[], str | None] = lambda: None  # why the server cannot go on, if so
        self._supervisor = supervisor

    @contextmanager
    def unless_passed(self, check: Callable[[], object], then: str) -> Iterator[Callable[[], None]]:
        """Run a check in another process beside the body, which gets a function that waits for it.

        If it fails, it says why, and this process ends with all that it has started; no other error
        comes before that. Once it has passed, the line `then` is said.
        """
        if not (child := os.fork()):
            with _ends_with(os._exit):
                check()

        def follow() -> None:
            code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
            if code < 0:
                say(f"diffray: a check of the model was killed ({signal.Signals(-code).name})")
            if code:
                _exit(1)
            if then:
                say(then)

        following = threading.Thread(target=follow, name="check", daemon=True)
        following.start()
        try:
            yield following.join
        finally:
            following.join()

    def watch(self) -> None:
        """Check every second; in a thread, because the main one may wait for a dead Ray."""
        deadline = math.inf
        while True:
            time.sleep(_CHECK_S)
            if reason := self.failure():
                self._end(reason)
            if os.getppid() != self._supervisor:
                self.stopped.set()
                self.limit_s = min(self.limit_s, LOST_S)
            if self.stopped.is_set():
                deadline = min(deadline, time.monotonic() + self.limit_s)
            if time.monotonic() > deadline:
                self._end(f"the server had not ended after {self.limit_s:g} s and was killed")

    def _end(self, reason: str) -> None:
        say(f"diffray: {reason}")
        _exit(1)


def say(line: str) -> None:
    """Write a line to stderr, which may be a terminal that was closed."""
    with suppress(OSError):
        os.write(2, f"{line}\n".encode())


def _exit(status: int) -> NoReturn:
    """End the server process now, without cleanup that could run twice or hang."""
    with suppress(OSError):  # Ray's threads print pages about each process that is killed
        silent = os.open(os.devnull, os.O_WRONLY)
        os.dup2(silent, 1)
        os.dup2(silent, 2)
    _kill_descendants()
    os._exit(status)


def _kill_descendants(others: Set[int] = frozenset()) -> None:
    """Kill every descendant except `others`.

    The children of a dead child become this process's own. A child's id is not reused before it is
    waited for here, so no foreign process can be hit.
    """
    deadline = time.monotonic() + _KILL_S
    while (found := children() - others) and time.monotonic() < deadline:
        for pid in found:
            with suppress(ProcessLookupError, ChildProcessError):
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, os.WNOHANG)
        time.sleep(0.01)


def _adopt_orphans() -> None:
    if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0):
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER) failed")
