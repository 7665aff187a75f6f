"""How far a long job has come: a bar on a terminal, now and then a line in a log."""

import sys
from time import monotonic
from types import TracebackType
from typing import Any, Self, TextIO

from tqdm import tqdm

LINE_SECONDS = 10.0


class Progress:
    """Counts requests; to be entered before the first and left after the last."""

    def __init__(
        self,
        total: int,
        before: int = 0,
        file: TextIO | None = None,
        line_seconds: float = LINE_SECONDS,
    ) -> None:
        self.total, self.done, self.failed = total, before, 0
        self._file = file or sys.stderr
        self._line_seconds = line_seconds
        self._bar: Any = None
        self._told = monotonic()

    def __enter__(self) -> Self:
        if self._file.isatty():
            self._bar = tqdm(
                total=self.total, initial=self.done, unit="request", file=self._file, leave=False
            )
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._bar is not None:
            self._bar.close()

    def one_more(self, failed: int) -> None:
        """Count a request; `failed` of this run's have failed."""
        self.done, self.failed = self.done + 1, failed
        if self._bar is not None:
            if failed:
                self._bar.set_postfix(failed=failed, refresh=False)
            self._bar.update()
        elif monotonic() - self._told >= self._line_seconds:
            self._told = monotonic()
            print(f"{self.done} of {self.total} done, {failed} failed", file=self._file, flush=True)
