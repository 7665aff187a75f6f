"""Keeps the machine busy beside what is measured or tested."""

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def busy(count: int) -> Iterator[None]:
    """Run processes that each keep a core busy.

    Each has a session of its own, as the programs of other terminals have: Linux shares the cores
    among sessions first, so that in this one they would starve the caller.
    """
    others = [
        subprocess.Popen([sys.executable, "-c", "while True: pass"], start_new_session=True)
        for _ in range(count)
    ]
    try:
        yield
    finally:
        for other in others:
            other.kill()
            other.wait()
