"""Shows an answer on a terminal: every step in place, at a readable pace."""

import os
import sys
import termios
import time
from collections.abc import Generator, Iterator, Sequence
from contextlib import closing, contextmanager
from itertools import takewhile, zip_longest
from typing import TextIO

from rich.cells import cell_len
from rich.console import Console
from rich.live import Live
from rich.text import Text

from diffray.cluster.cli.commands import printable
from diffray.cluster.frontend.output import Canvas
from diffray.components.config import counted

Tokens = Sequence[str | None]  # the text of each; None: masked
News = str | list[str | None]  # of an answer: more text, which is final, or the next step's canvas

_PATIENCE_S = 0.5  # with nothing new to show, before a note reports progress


def can_play(out: TextIO) -> bool:
    """Return whether the cursor can be moved: on a terminal whose TERM is set and not dumb."""
    return out.isatty() and os.environ.get("TERM", "dumb") not in ("dumb", "unknown")


def show(answer: Generator[News, None, None], out: TextIO, pace: float | None) -> None:
    """Show an answer as it arrives: with a pace and on a terminal that can, in place; else plainly.

    Control characters are written only to files.
    """
    with closing(answer):
        if pace is not None and can_play(out):
            with without_echo(), closing(Playback(out, pace)) as shown:
                for news in answer:
                    if isinstance(news, str):
                        shown.say(news)
                    else:
                        shown.step(news)
                shown.finish()
            return
        begun = False
        try:
            for news in answer:
                if isinstance(news, str):
                    out.write(printable(news) if out.isatty() else news)
                    out.flush()
                    begun = True
            begun = True
        finally:
            if begun:
                out.write("\n")
                out.flush()


class Playback:
    """The playback of one answer; `step` and `say` add to it at any rate.

    The text at a token's place is known once no mask precedes it. Steps are therefore kept until
    that holds for all tokens, and then shown one by one in the rows of the known text, so that
    nothing moves when masks become tokens.
    """

    def __init__(self, out: TextIO, pace: float) -> None:
        if pace < 1:
            raise ValueError(f"--pace must be at least 1 step per second (given: {pace:g})")
        self._console = console = Console(file=out, force_terminal=True, force_interactive=True)
        console.width = max(console.width - 1, 2)  # terminals differ in the last column
        self._live = Live(
            console=console, auto_refresh=False, redirect_stdout=False, redirect_stderr=False
        )
        # A mask for each width of a character: no column, one or two.
        self._masks = "", "#" if console.options.ascii_only else "\u2591", "\N{GETA MARK}"
        self._text, self._laid = "", 0  # the final text, and how much of it is in rows
        self._rows, self._start = [""], 0  # those not yet plain; where the last starts in the text
        self._steps: list[Tokens] = []  # not yet shown
        self._count = 0  # of all steps
        self._shown: Tokens = ()  # the canvas after the last step that was shown
        self._written = 0  # tokens after the last step
        self._drafts: list[str | None] = []  # behind them
        self._verified = ""  # how many of the drafts before were right
        self._seconds, self._due = 1 / pace, time.monotonic()  # of the next drawing

    def step(self, canvas: list[str | None]) -> None:
        """Add the canvas after one more step; a `Canvas` may end in drafts."""
        if self._steps and _has_no_gap(self._steps[-1]):
            self._play()
        self._count += 1
        tokens = [token and printable(token) for token in canvas]
        drafts = canvas.drafts if isinstance(canvas, Canvas) else 0
        written, before = len(tokens) - tokens.count(None) - drafts, self._written
        self._verified = ""
        if self._drafts and written > before:  # else nothing was verified
            pairs = zip(tokens[before:written], self._drafts, strict=False)
            right = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
            count = counted(len(self._drafts) - self._drafts.count(None), "draft")
            self._verified = f", {right} of {count} accepted"
        self._written, self._drafts = written, []
        if drafts:  # they follow the tokens that were written, perhaps with masks between
            self._drafts = tokens[written:]
            while self._drafts[-1] is None:
                self._drafts.pop()
            tokens[written:] = [None] * (len(tokens) - written)
        self._steps.append(tokens)
        if time.monotonic() > self._due + _PATIENCE_S:
            self._draw([Text(row) for row in self._rows], self._count, canvas.count(None))

    def say(self, text: str) -> None:
        """Add more text, which is final."""
        self._text += printable(text)
        if not self._steps:
            self._play()
            self._settle()

    def finish(self) -> None:
        """Show the rest at the pace; no more text follows."""
        self._play()
        self._wait()

    def close(self) -> None:
        """Show the rest immediately, and leave only the text."""
        try:
            if self._text or self._live.is_started:
                self._steps.clear()
                self._play()
                self._settle()
        finally:
            self._live.stop()

    def _play(self) -> None:
        """Show the text that is not in rows yet, in the steps that produced it."""
        if self._laid == len(self._text):
            return
        self._settle()
        before, *steps = self._shown, *self._steps
        self._shown = last = steps[-1] if steps else before
        pieces = _pieces(last, self._text, self._start)
        if len(steps) > 1:
            steps.insert(0, before)  # several steps start with their masks
        for number, now in enumerate(steps, self._count - len(steps) + 1):
            now = [*now, *[None] * (len(last) - len(now))]
            looks = self._looks(pieces, now, before)
            if number == self._count:
                drafts = (self._masks[1] if each is None else each for each in self._drafts)
                looks.append("".join(drafts), "italic yellow")
            self._draw(self._wrapped(looks), number, now.count(None))
            before = now
        self._rows = [row.plain for row in self._wrapped(Text(self._text[self._start :]))]
        self._laid, self._start = len(self._text), self._text.rfind(self._rows[-1])
        self._steps.clear()

    def _looks(self, pieces: list[tuple[int, str]], now: Tokens, before: Tokens) -> Text:
        """Return a text in pieces as it looks after a step: masks are dim, new tokens green."""
        looks = Text()
        for position, text in pieces:
            if position == len(self._shown):  # of no token
                looks.append(text)
                continue
            token = now[position]
            if token != self._shown[position]:
                text = _fitted(token or "", text, self._masks)
            is_new = position >= len(before) or token != before[position]
            looks.append(text, "dim" if token is None else "bold green" if is_new else "")
        return looks

    def _wrapped(self, text: Text) -> list[Text]:
        return [*text.wrap(self._console, self._console.width)]

    def _draw(self, rows: list[Text], number: int, masked: int) -> None:
        """Draw the last rows that fit, and a note, once the last drawing was seen long enough."""
        self._wait()
        verified = self._verified if number == self._count else ""
        note = Text(f"step {number}, {masked} left{verified}", "dim")
        self._show([*rows[-max(self._console.height - 2, 1) :], note])
        self._due = time.monotonic() + self._seconds

    def _settle(self) -> None:
        """Leave the rows as plain text, and only the last one to be redrawn."""
        *ended, last = map(Text, self._rows)
        with self._console:  # which writes both at once
            self._show([last])
            if ended:
                self._console.print(Text("\n").join(ended))
        del self._rows[:-1]

    def _show(self, rows: list[Text]) -> None:
        self._live.start()
        self._live.update(Text("\n").join(rows), refresh=True)

    def _wait(self) -> None:
        time.sleep(max(self._due - time.monotonic(), 0))


@contextmanager
def without_echo() -> Iterator[None]:
    """Turn off the echo of typed characters, if stdin is a terminal."""
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


def _has_no_gap(canvas: Tokens) -> bool:
    """Return whether no token follows a mask."""
    return None not in canvas[: len(canvas) - canvas.count(None)]


def _pieces(tokens: Tokens, text: str, begin: int) -> list[tuple[int, str]]:
    """Return the pieces of a text from `begin`, with the positions of the tokens they come from.

    A character of several tokens is in the piece of the next token that can be found in the text;
    the last piece is of no token, and has the position after the last.
    """
    pieces, end = [], 0
    for position, token in enumerate(tokens):
        if token and (at := text.find(token, end)) >= 0:
            end = at + len(token)
            pieces.append((position, text[begin:end]))
            begin = max(begin, end)
    return [*pieces, (len(tokens), text[begin:])]


def _fitted(token: str, text: str, masks: Sequence[str]) -> str:
    """Return a token in the columns of the text that replaces it, with masks where it has none."""
    signs = []
    for sign, earlier in zip_longest(text, token[: len(text)], fillvalue=""):
        fits = sign.isspace() == earlier.isspace() and cell_len(earlier) == cell_len(sign)
        stand_in = sign if sign.isspace() else masks[cell_len(sign)]
        signs.append(earlier if fits else stand_in)
    return "".join(signs)
