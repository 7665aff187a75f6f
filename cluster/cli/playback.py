"""Shows an answer on a terminal: every step in place, at a readable pace."""

import os
import shutil
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import groupby, pairwise
from types import TracebackType
from typing import Final, NamedTuple, Self, TextIO

from rich.cells import cell_len

from diffray.cluster.cli.rows import owners, printable, rows

Canvas = Sequence[str | None]  # the text of each token; None: masked

_PATIENCE_S: Final = 0.5  # with nothing new to show, before a note reports progress
_SHORT: Final = 40  # characters that may appear without masks first
_MASKS: Final = ("\N{LIGHT SHADE}", "#")  # the first in the terminal's encoding is used
_DIM, _GREEN, _BOLD = "2", "1;32", "1"


class _Sign(NamedTuple):
    """A character of the text, the position of its token, and its place in the token's text."""

    text: str
    width: int
    owner: int
    at: int


class Playback:
    """The playback of one answer; `step` and `say` add to it at any rate.

    A token's place is known once no mask precedes it. Steps are therefore kept until that holds
    for all tokens, and then shown one by one, with masks where tokens will appear, so that nothing
    on the screen moves. The last word is held back until it is complete, because it may not fit
    into its row. Without steps, words are written as they arrive, and the cursor is not moved.
    """

    def __init__(self, out: TextIO, pace: float) -> None:
        if pace < 1:
            raise ValueError(f"--pace must be at least 1 step per second (given: {pace:g})")
        self._out, self._seconds = out, 1 / pace
        size = shutil.get_terminal_size()
        self._width, self._height = max(size.columns - 1, 2), max(size.lines - 2, 1)
        self._mask = next(sign for sign in _MASKS if _has(out, sign))
        self._new = _BOLD if os.environ.get("NO_COLOR") else _GREEN
        self._text, self._laid = "", 0  # the final text, and how much of it is in rows
        self._steps: list[tuple[int, Canvas]] = []  # with their numbers, not yet shown
        self._count = 0
        self._shown: Canvas = ()  # the canvas after the last step that was shown
        # The rows that can be redrawn, the column where the first one starts, and how many rows
        # below it the cursor is; None: they have not been drawn.
        self._rows: list[list[_Sign]] = []
        self._column = 0
        self._below: int | None = None
        self._moves = False  # whether the cursor was moved and is therefore hidden
        self._due = time.monotonic() + _PATIENCE_S

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type | None, error: object, trace: TracebackType | None) -> None:
        """Show the rest immediately, and leave only the text."""
        self._settle()
        self._steps.clear()
        self._show(len(self._text))
        if kind is None or self._laid:
            self._put("\n")
        if self._moves:
            self._put("\x1b[?25h")

    def step(self, canvas: Canvas) -> None:
        """Add the canvas after one more step."""
        if self._steps and _has_no_gap(self._steps[-1][1]):
            self._show(self._last_word())
        self._count += 1
        known = [None if token is None else printable(token) for token in canvas]
        self._steps.append((self._count, known))
        if time.monotonic() > self._due + _PATIENCE_S:
            masked = known.count(None)
            self._draw(self._shown, self._shown, f"step {self._count}, {masked} masked")

    def say(self, text: str) -> None:
        """Add more text, which is final."""
        self._text += printable(text)
        if not self._steps:
            self._show(self._last_word())

    def finish(self) -> None:
        """Show the rest at the pace; no more text follows."""
        self._show(len(self._text))
        if self._moves:
            self._wait()

    def _last_word(self) -> int:
        return max(self._text.rfind(" "), self._text.rfind("\n")) + 1

    def _show(self, stop: int) -> None:
        """Show the text up to `stop`, in the steps that produced it."""
        if stop <= self._laid:
            return
        self._settle()
        steps, self._steps = self._steps, []
        if len(steps) > 1 or (steps and stop - self._laid > _SHORT):  # start with masks
            steps.insert(0, (steps[0][0] - 1, self._shown))
        last = steps[-1][1] if steps else self._shown
        text = self._text[self._laid : stop]
        signs = _signs(text, owners(last, self._text)[self._laid :])
        laid = [signs[low:high] for low, high in rows(text, self._width, self._column)]
        self._laid = stop
        # Text higher than the screen is played in parts, each with the steps that change it.
        for first in range(0, len(laid), self._height):
            if first:
                self._settle()
                self._put("\n")
                self._column = 0
            self._rows = laid[first : first + self._height]
            self._play(steps, last)
        self._shown = last

    def _play(self, steps: list[tuple[int, Canvas]], last: Canvas) -> None:
        before = self._shown
        for number, canvas in steps:
            owned = {sign.owner for row in self._rows for sign in row}
            new = sum(_at(canvas, each) not in (None, _at(before, each)) for each in owned)
            if new or self._below is None:
                self._wait()
                self._draw(canvas, before, f"step {number}" + f", {new} new" * bool(new), last)
            before = canvas
        if not steps:
            self._settle()

    def _settle(self) -> None:
        """Make the rows plain text, and continue where they end."""
        if self._rows:
            self._draw(None, None)
            used = sum(sign.width for sign in self._rows[-1])
            if len(self._rows) == 1:
                used += self._column
            self._rows, self._column, self._below = [], min(used, self._width), None

    def _draw(
        self, now: Canvas | None, before: Canvas | None, note: str = "", last: Canvas = ()
    ) -> None:
        """Draw or redraw the rows, and a note; without a canvas, as plain text.

        `last` is the canvas whose tokens make up the text.
        """
        self._rows = self._rows or [[]]
        lines = []
        for number, row in enumerate(self._rows):
            looks, room = [], self._width - (0 if number else self._column)
            for sign in row:
                room -= sign.width
                if room >= 0:
                    looks.append(self._look(sign, now, before, last))
            lines.append(_painted(looks))
        if now is None and self._below is None:
            self._put("\n".join(lines))
        else:
            if note:
                lines.append(_painted([(note[: self._width], _DIM)]))
            up = f"\x1b[{self._below}A" if self._below else ""
            right = f"\x1b[{self._column}C" if self._column else ""
            self._put(f"\x1b[?25l\r{up}{right}" + "\x1b[K\n".join(lines) + "\x1b[J")
            self._moves = True
        self._below = len(lines) - 1

    def _look(
        self, sign: _Sign, now: Canvas | None, before: Canvas | None, last: Canvas
    ) -> tuple[str, str]:
        """Return what to write in a sign's place, and its style."""
        if now is None or before is None or sign.owner >= len(last):
            return sign.text, ""
        token = _at(now, sign.owner)
        if token is None:
            return self._mask * sign.width, _DIM
        text = sign.text
        if token != last[sign.owner]:  # a later step replaces it
            text = token[sign.at : sign.at + 1]
            text = text if cell_len(text) == sign.width else " " * sign.width
        return text, self._new if token != _at(before, sign.owner) else ""

    def _wait(self) -> None:
        left = self._due - time.monotonic()
        if left > 0:
            time.sleep(left)
        self._due = time.monotonic() + self._seconds

    def _put(self, text: str) -> None:
        self._out.write(text)
        self._out.flush()


def can_play(out: TextIO) -> bool:
    """Return whether the cursor can be moved: on a terminal whose TERM is set and not dumb."""
    return out.isatty() and os.environ.get("TERM", "dumb") != "dumb"


@contextmanager
def without_echo() -> Iterator[None]:
    """Turn off the echo of typed characters, if stdin is a terminal."""
    import termios

    try:
        keys = sys.stdin.fileno()
        before = termios.tcgetattr(keys)
    except (termios.error, OSError, ValueError):
        yield
        return
    quiet = [*before]
    quiet[3] &= ~termios.ECHO
    termios.tcsetattr(keys, termios.TCSADRAIN, quiet)
    try:
        yield
    finally:
        termios.tcsetattr(keys, termios.TCSADRAIN, before)


def _has(out: TextIO, sign: str) -> bool:
    try:
        sign.encode(out.encoding or "utf-8")
    except UnicodeEncodeError:
        return False
    return True


def _has_no_gap(canvas: Canvas) -> bool:
    """Return whether no token follows a mask."""
    return all(after is None or token is not None for token, after in pairwise(canvas))


def _at(canvas: Canvas, position: int) -> str | None:
    return canvas[position] if position < len(canvas) else None


def _signs(text: str, owned: list[int]) -> list[_Sign]:
    made, at = [], -1
    for number, (sign, owner) in enumerate(zip(text, owned, strict=False)):
        at = at + 1 if number and owned[number - 1] == owner else 0
        made.append(_Sign(sign, cell_len(sign), owner, at))
    return made


def _painted(looks: list[tuple[str, str]]) -> str:
    """Join texts, with one escape sequence for each run of a style."""
    made = []
    for style, run in groupby(looks, key=lambda look: look[1]):
        text = "".join(part for part, _ in run)
        made.append(f"\x1b[{style}m{text}\x1b[0m" if style else text)
    return "".join(made)
