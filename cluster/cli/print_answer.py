"""One answer on the terminal: streamed as it becomes final, or animated step by step."""

import sys
import time
from collections.abc import Collection
from collections.abc import Sequence as Items
from dataclasses import dataclass
from itertools import groupby, islice, zip_longest

from rich.console import Console
from rich.live import Live
from rich.text import Text

from diffray.cluster.control.llm import DiffusionLLM
from diffray.components.params import SamplingParams
from diffray.workers.text import Messages, TextStream, Tokenizer

Canvas = Items[int | None]

FRAME_SECONDS = 0.05  # the shortest time of a frame: a small model is too quick to follow
MASK = "\N{LIGHT SHADE}"
# They would move the cursor that draws the next frame.
_CONTROLS = dict.fromkeys({*range(32), 127} - {ord("\n")}, " ")


@dataclass(frozen=True, slots=True)
class Measured:
    """An answer's counts, with its end token; the time includes the prompt, not the loading."""

    tokens: int
    forwards: int
    seconds: float

    def __str__(self) -> str:
        return (
            f"{self.tokens} tokens, {self.forwards} forwards, "
            f"{self.tokens / max(self.forwards, 1):.2f} tokens per forward, "
            f"{self.tokens / self.seconds:.1f} tokens/s ({self.seconds:.2f} s)"
        )


def as_prompt(llm: DiffusionLLM, text: str, *, raw: bool) -> str | Messages:
    """Return a chat message where the model has a chat template, else the text itself."""
    if llm.tokenizer is None:
        raise ValueError(
            "the checkpoint has no tokenizer.json, so it cannot read text; "
            "in Python, DiffusionLLM takes token ids"
        )
    if raw or not llm.tokenizer.fast.chat_template:
        return text
    return [{"role": "user", "content": text}]


def print_answer(
    llm: DiffusionLLM, prompt: str | Messages, params: SamplingParams, *, watch: bool
) -> Measured:
    """Print the answer; it is animated only on a terminal."""
    if watch and sys.stdout.isatty():
        return animate(llm, prompt, params, Console())
    began = time.perf_counter()
    tokens = forwards = 0
    for delta in llm.stream(prompt, params):
        sys.stdout.write(delta.text)
        sys.stdout.flush()
        tokens, forwards = tokens + len(delta.token_ids), delta.forwards
    sys.stdout.write("\n")
    return Measured(tokens, forwards, time.perf_counter() - began)


def animate(
    llm: DiffusionLLM,
    prompt: str | Messages,
    params: SamplingParams,
    console: Console,
    frame_seconds: float = FRAME_SECONDS,
) -> Measured:
    """Draw every step in place, then leave only the text; pauses are not measured."""
    tokenizer = llm.tokenizer
    assert tokenizer is not None
    ends = {*params.stop_token_ids, *(() if params.ignore_eos else llm.engine.eos_token_ids)}
    canvas: Canvas = ()
    steps, seconds = 0, 0.0
    with Live(console=console, auto_refresh=False, transient=True) as live:
        began = time.perf_counter()
        for now in llm.watch(prompt, params):
            took = time.perf_counter() - began
            steps, seconds = steps + 1, seconds + took
            live.update(frame(tokenizer, canvas, now, ends, steps), refresh=True)
            canvas = now
            time.sleep(max(0.0, frame_seconds - took))
            began = time.perf_counter()
    ids = [token for token in canvas if token is not None]
    console.file.write(_final_text(tokenizer, ids, params, ends) + "\n")
    return Measured(len(ids), steps, seconds)


def frame(
    tokenizer: Tokenizer, before: Canvas, now: Canvas, ends: Collection[int], step: int
) -> Text:
    """Return the canvas up to its first end token: masks dim, tokens new since `before` bright."""
    end = next((at for at, token in enumerate(now) if token in ends), len(now))
    masked = sum(token is None for token in now[:end])
    text = Text()
    text.append(f"step {step}, {masked} masked of {end}\n", style="dim")
    places = islice(zip_longest(now, before), end)
    for style, run in groupby(places, key=lambda place: _style(*place)):
        tokens = [token for token, _ in run]
        ids = [token for token in tokens if token is not None]
        shown = tokenizer.decode(ids).translate(_CONTROLS) if ids else MASK * len(tokens)
        text.append(shown, style=style)
    return text


def _style(token: int | None, before: int | None) -> str:
    if token is None:
        return "dim"
    return "" if token == before else "bold green"


def _final_text(
    tokenizer: Tokenizer, ids: list[int], params: SamplingParams, ends: Collection[int]
) -> str:
    """Return the text of all tokens, without what ended it."""
    keep = params.include_stop_str_in_output
    skip, least = params.skip_special_tokens, params.min_tokens
    stream = TextStream(tokenizer, params.stop, keep, skip, least)
    stream.push(ids[:-1] if ids and ids[-1] in ends and not keep else ids)
    stream.finish()
    return stream.text
