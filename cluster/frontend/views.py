"""Shows an output: a picture of its denoising in notebooks, the denoising itself in terminals."""

import sys
import time
from base64 import b64encode
from collections.abc import Iterator
from collections.abc import Sequence as Items
from html import escape
from importlib import import_module
from itertools import pairwise
from textwrap import wrap
from typing import Any, NamedTuple
from unicodedata import east_asian_width

from diffray.cluster.frontend.output import CompletionOutput, RequestOutput
from diffray.components.config import counted

# These keep an output in a notebook within a few hundred kilobytes.
_MOST_PICTURES = 4
_MOST_TOKENS = 512
_MASK = "\N{LIGHT SHADE}"
# Control characters would move the cursor that draws the next frame. XML forbids most of them, and
# a tab has no fixed width.
_CONTROLS = dict.fromkeys({*range(32), *range(127, 160), 0xFFFE, 0xFFFF} - {ord("\n")}, " ")


def as_html(output: RequestOutput) -> str:
    """Return a picture of each choice's denoising, and its text, which can be selected.

    The pictures are images, so that their styles cannot change the page.
    """
    parts = [_figure(output.prompt or "", each) for each in output.outputs[:_MOST_PICTURES]]
    for choice in output.outputs[_MOST_PICTURES:]:
        parts.append(_plain(choice))
    return f"<div>{''.join(parts)}</div>"


def _figure(prompt: str, choice: CompletionOutput) -> str:
    if not choice.visible or len(choice.visible) > _MOST_TOKENS:
        return _plain(choice)
    drawn = b64encode(picture(prompt, choice.visible).encode()).decode()
    return (
        f'<img src="data:image/svg+xml;base64,{drawn}" alt="The denoising of the text below" '
        f'style="width: 100%; max-width: 700px">{_plain(choice)}'
    )


def _plain(choice: CompletionOutput) -> str:
    text = choice.text if choice.tokens else str(choice.token_ids)
    return (
        f'<pre style="white-space: pre-wrap">{escape(text)}</pre>'
        f"<p><small>{escape(summary(choice))}</small></p>"
    )


def summary(choice: CompletionOutput) -> str:
    """Return a one-line summary of an answer."""
    tokens, forwards = len(choice.token_ids), choice.forwards
    rate = tokens / max(forwards, 1)
    ended = f", {choice.finish_reason}" if choice.finish_reason else ""
    counts = f"{counted(tokens, 'token')} in {counted(forwards, 'forward')}"
    return f"{counts}, {rate:.1f} tokens per forward{ended}"


def show(output: RequestOutput, pace: float) -> None:
    """Show an output in a notebook, a terminal or as plain text; only a terminal has a pace."""
    if not pace > 0:
        raise ValueError(f"pace is the steps per second, above 0 (given: {pace:g})")
    if (display := _notebook()) is not None:
        display(output)
        return
    for choice in output.outputs:
        if sys.stdout.isatty() and choice.visible:
            _play(choice, pace)
        print(choice.text if choice.tokens else choice.token_ids)
        print(summary(choice))


def _notebook() -> Any:
    """Return the function that displays an object in this notebook; None outside one."""
    shell = sys.modules.get("IPython")
    running = None if shell is None else shell.get_ipython()
    if running is None or not hasattr(running, "kernel"):  # in a terminal IPython has none
        return None
    return import_module("IPython.display").display


def _play(choice: CompletionOutput, pace: float) -> None:
    """Draw every step in place, then remove the drawing."""
    from rich.console import Console
    from rich.live import Live

    with Live(console=Console(), auto_refresh=False, transient=True) as live:
        for step in range(1 + max(step for _, step in choice.visible)):
            live.update(frame(choice.visible, step), refresh=True)
            time.sleep(1 / pace)


def frame(tokens: list[tuple[str, int]], step: int) -> Any:
    """Return the canvas after a step, counted from 0: its new tokens are bright, masks dim."""
    from rich.text import Text

    masked = sum(final > step for _, final in tokens)
    text = Text(f"step {step + 1}, {masked} masked of {len(tokens)}\n")
    for content, final in tokens:
        shown = content.translate(_CONTROLS)
        if final > step:
            text.append(_MASK * max(len(shown), 1), style="dim")
        else:
            text.append(shown, style="bold green" if final == step else "")
    return text


CELL, LINE, MARGIN, COLUMNS = 10, 30, 20, 66
STEP_S, LONGEST_S, HOLD_S = 0.45, 20.0, 3.0  # a step, all steps, and the answer at the end
TITLE = "A diffusion language model fills a canvas of mask tokens in any order"
DRAFTING = "A language model verifies the drafts of its last step, and drafts again"

STYLE = """
.card { fill: #ffffff; stroke: #d0d7de } text { fill: #1f2328; font: 16px monospace }
.draft { fill: #bf8700; font-style: italic; opacity: 0 }
.mask { fill: #afb8c1; opacity: 0 } .note { fill: #656d76; font-size: 14px } .hidden { opacity: 0 }
@media (prefers-color-scheme: dark) {
.card { fill: #0d1117; stroke: #30363d } text { fill: #e6edf3 } .mask { fill: #484f58 }
.note { fill: #8d96a0 } }
@media (prefers-reduced-motion: reduce) { * { animation: none !important } }
"""
HIDDEN, SHOWN, NEW = "opacity: 0", "opacity: 1", "opacity: 1; fill: #2da44e"


class _Part(NamedTuple):
    """A piece of a token within one line."""

    token: int
    column: int
    row: int
    text: str


def picture(
    question: str,
    tokens: Items[tuple[str, int]],
    drafts: Items[tuple[str, int, int]] = (),
) -> str:
    """Return the SVG: the question, the canvas, and how many masks are left.

    Tokens come with the step at which they became final, counted from 0; drafts with the step
    after which they stood there, and their position.
    """
    texts, steps = [_clean(text) for text, _ in tokens], [1 + step for _, step in tokens]
    count = max(steps, default=0)
    step_s = min(STEP_S, LONGEST_S / max(count, 1))
    end = (count + 1) * step_s + HOLD_S
    asked = wrap(_clean(question), 74)
    top = 60 + 22 * len(asked) if asked else 36
    parts = list(_parts(texts))
    base = top + 46 + max((part.row for part in parts), default=0) * LINE
    style, body = [STYLE], []
    for row, line in enumerate(asked):
        body.append(f'<text x="{MARGIN}" y="{36 + 22 * row}" class="note">{escape(line)}</text>')
    for part in parts:
        x, y, step = MARGIN + part.column * CELL, top + part.row * LINE, steps[part.token]
        box = f'x="{x + 1}" y="{y - 17}" width="{_cells(part.text) * CELL - 2}" height="22" rx="3"'
        text = _text(x, y, part.text, f"t{step}")
        body.append(f'<rect {box} class="mask m{step}"/>{text}')
    places = {part.token: part for part in reversed(parts)}
    for text, step, position in drafts:
        if (place := places.get(position)) and _clean(text).strip():
            x, y = MARGIN + place.column * CELL, top + place.row * LINE
            start = text if place.text.startswith(" ") else text.lstrip(" ")
            body.append(_text(x, y, _clean(start), f"draft n{1 + step}"))
    for step in range(count + 1):
        now, after = step * step_s, end if step == count else (step + 1) * step_s
        style.append(_keyframes(f"n{step}", end, (0, HIDDEN), (now, SHOWN), (after, HIDDEN)))
        if step in steps:
            style.append(_keyframes(f"m{step}", end, (0, SHOWN), (now, HIDDEN)))
            new = (now, NEW), (now + step_s, SHOWN)
            style.append(_keyframes(f"t{step}", end, (0, HIDDEN), *new))
        left = sum(each > step for each in steps)
        what = "token" if drafts else "mask"
        said = f"step {step} of {count}: {counted(left, what)} left"
        kind = f"note n{step}" + " hidden" * (step < count)
        body.append(f'<text x="{MARGIN}" y="{base}" class="{kind}">{said}</text>')
    wide, high = COLUMNS * CELL + 2 * MARGIN, base + MARGIN
    description = f"{f'Question: {_clean(question)} ' * bool(asked)}Answer: {''.join(texts)}"
    return f"""<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {wide} {high}" role="img">
<title>{DRAFTING if drafts else TITLE}</title>
<desc>{escape(description)}</desc>
<style>{"".join(style)}</style>
<rect class="card" x="1" y="1" width="{wide - 2}" height="{high - 2}" rx="8"/>
""" + "\n".join([*body, "</svg>\n"])


def _parts(texts: Items[str]) -> Iterator[_Part]:
    """Place each token; lines break before words, and inside a word longer than a line."""
    column, row = 0, 0
    for at, text in enumerate(texts):
        word = "".join(texts[at : at + COLUMNS]).lstrip(" ").partition(" ")[0].partition("\n")[0]
        if text.startswith(" ") and column and column + 1 + _cells(word) > COLUMNS:
            column, row, text = 0, row + 1, text[1:]
        for number, line in enumerate(text.split("\n")):
            if number:
                column, row = 0, row + 1
            while line:
                fits = max(COLUMNS - column, 0)
                while _cells(line[:fits]) > COLUMNS - column:
                    fits -= 1
                if fits:
                    yield _Part(at, column, row, line[:fits])
                    column, line = column + _cells(line[:fits]), line[fits:]
                if line:
                    column, row = 0, row + 1


def _clean(text: str) -> str:
    return text.translate(_CONTROLS).encode(errors="replace").decode()


def _cells(text: str) -> int:
    return sum(1 + (east_asian_width(letter) in "WF") for letter in text)


def _text(x: int, y: int, content: str, kind: str) -> str:
    """Return a text in cells of one width, whatever the font is."""
    bare = content.strip(" ")
    x += (len(content) - len(content.lstrip(" "))) * CELL
    size = f' textLength="{_cells(bare) * CELL}"' if bare else ""
    return f'<text x="{x}" y="{y}" class="{kind}"{size}>{escape(bare)}</text>'


def _keyframes(name: str, end: float, *changes: tuple[float, str]) -> str:
    """Return an endless animation that enters each state at its time in seconds."""
    parts = [
        f"{100 * begin / end:.2f}%, {100 * (stop - 0.01) / end:.2f}% {{ {state} }}"
        for (begin, state), (stop, _) in pairwise([*changes, (end, "")])
        if begin < stop
    ]
    rule = f".{name} {{ animation: {name} {end:g}s infinite }}"
    return f"@keyframes {name} {{ {' '.join(parts)} }} {rule}"
