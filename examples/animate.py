"""Draws a canvas while it is denoised: `python examples/animate.py` writes docs/denoising.svg.

The demo model answers one question, two tokens a step. Masks are grey blocks, as wide as the tokens
that replace them. The picture is animated by CSS alone, and shows the answer where nothing moves.
"""

import argparse
from collections.abc import Iterator
from html import escape
from itertools import pairwise
from pathlib import Path
from textwrap import wrap

from diffray import DiffusionLLM, SamplingParams
from diffray.components.checkpoints.demos import EXAMPLE

CELL, LINE, MARGIN, COLUMNS = 10, 30, 20, 66
STEP_S, HOLD_S = 0.45, 3.0
DIFFUSION = {"decoder": {"kind": "fixed", "steps": 28}, "block_length": 28}
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


def generate(question: str) -> tuple[list[str], list[int]]:
    """Return the answer's tokens as text, and the step at which each became final."""
    params = SamplingParams(max_tokens=56, diffusion=DIFFUSION)
    with DiffusionLLM("demo") as llm:
        assert llm.tokenizer is not None
        *frames, answer = llm.watch([{"role": "user", "content": question}], params)
        ends = llm.engine.eos_token_ids
        tokens = [llm.tokenizer.decode([id]) for id in answer if id is not None and id not in ends]
    steps = [1 + sum(frame[at] is None for frame in frames) for at in range(len(tokens))]
    return tokens, steps


def places(tokens: list[str]) -> Iterator[tuple[int, int, str]]:
    """Yield the left end, the line and the text of each token; a line breaks before a word."""
    column, row = 0, 0
    for at, token in enumerate(tokens):
        word = "".join(tokens[at:]).lstrip(" ").partition(" ")[0]
        if token.startswith(" ") and column + 1 + len(word) > COLUMNS:
            column, row, token = 0, row + 1, token[1:] or token
        yield MARGIN + column * CELL, row, token
        column += len(token)


def cells(x: int, y: int, content: str, kind: str) -> str:
    """Return a text in cells of one width, whatever the font is."""
    bare = content.strip(" ")
    x += (len(content) - len(content.lstrip(" "))) * CELL
    size = f' textLength="{len(bare) * CELL}"' if bare else ""
    return f'<text x="{x}" y="{y}" class="{kind}"{size}>{escape(bare)}</text>'


def keyframes(name: str, end: float, *changes: tuple[float, str]) -> str:
    """Return an endless animation that takes each state at its second."""
    parts = [
        f"{100 * begin / end:.2f}%, {100 * (stop - 0.01) / end:.2f}% {{ {state} }}"
        for (begin, state), (stop, _) in pairwise([*changes, (end, "")])
        if begin < stop
    ]
    rule = f".{name} {{ animation: {name} {end:g}s infinite }}"
    return f"@keyframes {name} {{ {' '.join(parts)} }} {rule}"


def picture(question: str, tokens: list[str], steps: list[int]) -> str:
    """Return the SVG: the question, the canvas, and how many masks are left."""
    count = max(steps)
    end = (count + 1) * STEP_S + HOLD_S
    placed = list(places(tokens))
    base = 150 + max(row for _, row, _ in placed) * LINE
    style, body = [STYLE], []
    for row, line in enumerate(wrap(question, 74)):
        body.append(f'<text x="{MARGIN}" y="{36 + 22 * row}" class="note">{escape(line)}</text>')
    for (x, row, token), step in zip(placed, steps, strict=True):
        y, width = 104 + row * LINE, len(token) * CELL - 2
        box = f'x="{x + 1}" y="{y - 17}" width="{width}" height="22" rx="3"'
        body.append(f'<rect {box} class="mask m{step}"/>{cells(x, y, token, f"t{step}")}')
    for step in range(count + 1):
        now, after = step * STEP_S, end if step == count else (step + 1) * STEP_S
        style.append(keyframes(f"n{step}", end, (0, HIDDEN), (now, SHOWN), (after, HIDDEN)))
        style.append(keyframes(f"m{step}", end, (0, SHOWN), (now, HIDDEN)))
        new = (now, NEW), (now + STEP_S, SHOWN)
        style.append(keyframes(f"t{step}", end, (0, HIDDEN), *new))
        said = f"step {step} of {count}: {sum(each > step for each in steps)} masks left"
        kind = f"note n{step}" + " hidden" * (step < count)
        body.append(f'<text x="{MARGIN}" y="{base}" class="{kind}">{said}</text>')
    wide, high = COLUMNS * CELL + 2 * MARGIN, base + MARGIN
    told = f"Question: {question} Answer: {''.join(tokens)}"
    return f"""<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {wide} {high}" role="img">
<title>{TITLE}</title>
<desc>{escape(told)}</desc>
<style>{"".join(style)}</style>
<rect class="card" x="1" y="1" width="{wide - 2}" height="{high - 2}" rx="8"/>
""" + "\n".join([*body, "</svg>\n"])


def main() -> None:
    """Generate an answer and write its picture."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, default=Path("docs/denoising.svg"))
    out = parser.parse_args().out
    tokens, steps = generate(EXAMPLE)
    out.write_text(picture(EXAMPLE, tokens, steps))
    print(f"{out}: {len(tokens)} tokens in {max(steps)} steps")


if __name__ == "__main__":
    main()
