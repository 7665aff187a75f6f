"""Ctrl-C in a benchmark: what has finished by then is kept, and one sentence says so."""

from types import TracebackType
from typing import Final, Self

import typer

_EXIT: Final = 130  # as shells tell of SIGINT


class Interruptible:
    """A block that Ctrl-C ends without a traceback; what follows writes down what there is."""

    def __init__(self) -> None:
        self.interrupted = False

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> bool:
        self.interrupted = isinstance(error, KeyboardInterrupt)
        return self.interrupted

    def facts(self, done: int, whole: int) -> dict[str, str]:
        """Return what a report must tell of it."""
        return {"interrupted": f"after {done} of {whole} runs"} if self.interrupted else {}

    def end(self, done: int, whole: int, part: bool = False) -> None:
        """End the command, if it was interrupted; `part` says that a run was kept in part."""
        if self.interrupted:
            what = (
                f"after {done} of {whole} runs; results are those of what had finished"
                if done or part
                else "before anything had finished; there are no results"
            )
            typer.echo(f"diffray: interrupted {what}", err=True)
            raise typer.Exit(_EXIT)
