"""Denoising as a person can watch it: the canvas after every step, on a terminal."""

import time
from collections.abc import Collection, Iterator
from collections.abc import Sequence as Items
from itertools import groupby, islice, zip_longest

from rich.console import Console
from rich.live import Live
from rich.text import Text

from diffray.cluster.cli.measured import Measured
from diffray.cluster.control.llm import DiffusionLLM
from diffray.components.params import SamplingParams
from diffray.workers.text import Messages, TextStream, Tokenizer

Canvas = Items[int | None]

FRAME_SECONDS = 0.05  # a frame stays so long at least: a small model is too quick to follow
MASK = "\N{LIGHT SHADE}"
STYLES = {"masked": "dim", "new": "bold green", "known": ""}
# They would move the cursor that draws the next frame.
_CONTROLS = dict.fromkeys({*range(32), 127} - {ord("\n")}, " ")


def animate(
    llm: DiffusionLLM,
    prompt: str | Messages,
    params: SamplingParams,
    console: Console,
    frame_seconds: float = FRAME_SECONDS,
) -> Measured:
    """Draw every step in place, then leave the text alone; pauses are not measured."""
    tokenizer = llm.tokenizer
    assert tokenizer is not None
    ends = {*params.stop_token_ids, *(() if params.ignore_eos else llm.engine.eos_token_ids)}
    canvas: Canvas = ()
    steps, seconds = 0, 0.0
    with Live(console=console, auto_refresh=False, transient=True) as live:
        for now, took in _timed(llm.watch(prompt, params)):
            steps, seconds = steps + 1, seconds + took
            live.update(frame(tokenizer, canvas, now, ends, steps), refresh=True)
            canvas = now
            time.sleep(max(0.0, frame_seconds - took))
    ids = [token for token in canvas if token is not None]
    console.file.write(final_text(tokenizer, ids, params, ends) + "\n")
    return Measured(len(ids), steps, seconds)


def frame(
    tokenizer: Tokenizer, before: Canvas, now: Canvas, ends: Collection[int], step: int
) -> Text:
    """Return the canvas up to its first end token: masks dim, what is new since `before` bright."""
    end = next((at for at, token in enumerate(now) if token in ends), len(now))
    masked = sum(token is None for token in now[:end])
    text = Text()
    text.append(f"step {step}, {masked} masked of {end}\n", style="dim")
    places = islice(zip_longest(now, before), end)
    for state, run in groupby(places, key=lambda place: _state(*place)):
        tokens = [token for token, _ in run]
        ids = [token for token in tokens if token is not None]
        shown = tokenizer.decode(ids).translate(_CONTROLS) if ids else MASK * len(tokens)
        text.append(shown, style=STYLES[state])
    return text


def final_text(
    tokenizer: Tokenizer, ids: list[int], params: SamplingParams, ends: Collection[int]
) -> str:
    """Return the text of all tokens, without what ended it."""
    keep = params.include_stop_str_in_output
    skip, least = params.skip_special_tokens, params.min_tokens
    stream = TextStream(tokenizer, params.stop, keep, skip, least)
    stream.push(ids[:-1] if ids and ids[-1] in ends and not keep else ids)
    stream.finish()
    return stream.text


def _state(token: int | None, before: int | None) -> str:
    if token is None:
        return "masked"
    return "known" if token == before else "new"


def _timed(frames: Iterator[list[int | None]]) -> Iterator[tuple[list[int | None], float]]:
    """Yield each item with the seconds that it took to come."""
    began = time.perf_counter()
    for item in frames:
        yield item, time.perf_counter() - began
        began = time.perf_counter()
