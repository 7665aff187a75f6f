"""What was tried and what came of it, a line each."""

import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass


@dataclass
class Report:
    """The checks so far."""

    failed: int = 0

    def check(self, sentence: str, tried: Callable[[], object]) -> bool:
        """Try something; print what it raises, and continue with the next check."""
        begin = time.monotonic()
        try:
            tried()
        except Exception as error:
            self.failed += 1
            where = traceback.extract_tb(error.__traceback__)[-1]
            words = " ".join((str(error) or type(error).__name__).split())
            reason = f"{words[-600:]} ({where.name}, line {where.lineno})"
            print(f"FAILED  {sentence}: {reason}", flush=True)
            return False
        print(f"ok      {sentence} ({time.monotonic() - begin:.1f} s)", flush=True)
        return True
