"""Runs code that a model wrote, in a process that can only calculate (jail.py)."""

import os
import secrets
import signal
import subprocess
import sys
import tempfile
from contextlib import suppress
from pathlib import Path
from threading import Timer
from typing import Final

SECONDS: Final = 10.0
_JAIL: Final = Path(__file__).with_name("jail.py")
_LONGEST, _SHOWN = 2000, 200  # bytes that are read of what a program says, and shown


def check_sandbox() -> None:
    """Raise where programs cannot be run."""
    if said := failure("assert 1 + 1 == 2"):
        raise ValueError(
            "the scorer 'code' runs what the model wrote in a sandbox, which needs Linux with "
            f"seccomp on x86-64 or ARM 64 ({said})"
        )


def failure(program: str, seconds: float = SECONDS) -> str | None:
    """Run a program to its end; return why it failed, None if it did not."""
    token = secrets.token_hex(16)
    late = False
    with (
        tempfile.TemporaryDirectory() as folder,
        subprocess.Popen(
            [sys.executable, "-I", "-S", str(_JAIL), str(seconds)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={},
            cwd=folder,
            start_new_session=True,
        ) as process,
    ):

        def end() -> None:
            nonlocal late
            late = True
            _kill(process)

        timer = Timer(seconds, end)
        timer.start()
        try:
            assert process.stdin is not None and process.stdout is not None
            with suppress(BrokenPipeError):  # it ended before; its exit says how
                process.stdin.write(f"{token}\n{program}".encode("utf-8", "replace"))
                process.stdin.close()
            said = process.stdout.read(_LONGEST).decode("utf-8", "replace")
        finally:
            timer.cancel()
            _kill(process)
    if said == token:
        return None
    if late or process.returncode == -signal.SIGXCPU:
        return f"it ran longer than {seconds:g} s"
    return said[:_SHOWN] or f"it ended with status {process.returncode}"


def _kill(process: "subprocess.Popen[bytes]") -> None:
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
