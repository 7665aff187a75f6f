"""Draws a denoising as an SVG: masks are grey blocks that turn into the tokens that replace them.

The picture is animated by CSS alone, loads no other files, and shows the answer where animations
are off.
"""

from collections.abc import Iterator
from collections.abc import Sequence as Items
from html import escape
from itertools import pairwise
from textwrap import wrap
from typing import NamedTuple
from unicodedata import east_asian_width

from diffray.components.config import counted

CELL, LINE, MARGIN, COLUMNS = 10, 30, 20, 66
STEP_S, LONGEST_S, HOLD_S = 0.45, 20.0, 3.0  # a step, all steps, and the answer at the end
TITLE = "A diffusion language model fills a canvas of mask tokens in any order"

STYLE = """
.card { fill: #ffffff; stroke: #d0d7de } text { fill: #1f2328; font: 16px monospace }
.mask { fill: #afb8c1; opacity: 0 } .note { fill: #656d76; font-size: 14px } .hidden { opacity: 0 }
@media (prefers-color-scheme: dark) {
.card { fill: #0d1117; stroke: #30363d } text { fill: #e6edf3 } .mask { fill: #484f58 }
.note { fill: #8d96a0 } }
@media (prefers-reduced-motion: reduce) { * { animation: none !important } }
"""
HIDDEN, SHOWN, NEW = "opacity: 0", "opacity: 1", "opacity: 1; fill: #2da44e"
# XML forbids most control characters, and a tab has no fixed width.
_CONTROLS = dict.fromkeys({*range(32), *range(127, 160), 0xFFFE, 0xFFFF} - {ord("\n")}, " ")


class _Part(NamedTuple):
    """A piece of a token within one line."""

    token: int
    column: int
    row: int
    text: str


def picture(question: str, tokens: Items[tuple[str, int]]) -> str:
    """Return the SVG: the question, the canvas, and how many masks are left.

    Tokens come with the step at which they became final, counted from 0.
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
    for step in range(count + 1):
        now, after = step * step_s, end if step == count else (step + 1) * step_s
        style.append(_keyframes(f"n{step}", end, (0, HIDDEN), (now, SHOWN), (after, HIDDEN)))
        if step in steps:
            style.append(_keyframes(f"m{step}", end, (0, SHOWN), (now, HIDDEN)))
            new = (now, NEW), (now + step_s, SHOWN)
            style.append(_keyframes(f"t{step}", end, (0, HIDDEN), *new))
        left = sum(each > step for each in steps)
        said = f"step {step} of {count}: {counted(left, 'mask')} left"
        kind = f"note n{step}" + " hidden" * (step < count)
        body.append(f'<text x="{MARGIN}" y="{base}" class="{kind}">{said}</text>')
    wide, high = COLUMNS * CELL + 2 * MARGIN, base + MARGIN
    description = f"{f'Question: {_clean(question)} ' * bool(asked)}Answer: {''.join(texts)}"
    return f"""<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {wide} {high}" role="img">
<title>{TITLE}</title>
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
