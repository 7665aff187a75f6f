"""How a command ends when something goes wrong."""

from collections.abc import Iterator
from contextlib import contextmanager

import typer

# Control characters would let an answer move the cursor.
_CONTROLS = dict.fromkeys({*range(32), *range(127, 160)} - {ord("\n")}, " ") | {ord("\t"): "    "}


def printable(text: str) -> str:
    """Return a text with spaces instead of control characters, except newlines."""
    return text.translate(_CONTROLS)


@contextmanager
def one_sentence() -> Iterator[None]:
    """Turn an error that the user can fix into one line and exit code 1; bugs keep a traceback."""
    try:
        yield
    except (BrokenPipeError, typer.Exit):
        raise
    except FileNotFoundError as error:
        _fail(f"no such file: {error.filename}" if error.filename else error)
    except (ValueError, OSError) as error:
        _fail(error)
    except RuntimeError as error:
        from torch import OutOfMemoryError

        if not isinstance(error, OutOfMemoryError):
            raise
        _fail(error)


def _fail(error: Exception | str) -> None:
    typer.echo(printable(f"diffray: {error}"), err=True)
    raise typer.Exit(1) from None
