"""One answer of a model in this process, printed with its counts."""

import sys
import time
from collections.abc import Collection, Generator, Iterator
from dataclasses import dataclass
from functools import cache
from typing import TypeVar

from diffray.cluster.cli.playback import News, can_play, show
from diffray.cluster.control.llm import DiffusionLLM
from diffray.cluster.frontend.text import Messages, TextStream
from diffray.components.config import counted
from diffray.components.params import SamplingParams
from diffray.components.policy import Policy

Asked = str | list[int] | Messages
_Item = TypeVar("_Item")


@dataclass(slots=True)
class Measured:
    """An answer's counts, with its end token; the time includes the prompt, not the loading."""

    tokens: int = 0
    forwards: int = 0
    seconds: float = 0.0

    def __str__(self) -> str:
        return (
            f"{counted(self.tokens, 'token')}, {counted(self.forwards, 'forward')}, "
            f"{self.tokens / max(self.forwards, 1):.2f} tokens per forward, "
            f"{self.tokens / self.seconds:.1f} tokens/s ({self.seconds:.2f} s)"
        )


def as_prompt(llm: DiffusionLLM, text: str, *, raw: bool) -> Asked:
    """Return a chat message where the model has a chat template, else the text or its ids."""
    if llm.tokenizer is None:
        raise ValueError(
            "the checkpoint has no tokenizer.json, so it cannot read text; "
            "in Python, DiffusionLLM takes token ids"
        )
    if raw:
        return llm.tokenizer.encode(text, True)
    if not llm.tokenizer.fast.chat_template:
        return text
    return [{"role": "user", "content": text}]


def print_answer(
    llm: DiffusionLLM, prompt: Asked, params: SamplingParams, *, pace: float | None
) -> Measured:
    """Print the answer; with a pace, show every step if the terminal can."""
    measured = Measured()
    watch = pace is not None and can_play(sys.stdout)
    show((steps if watch else _texts)(llm, prompt, params, measured), sys.stdout, pace)
    return measured


def steps(
    llm: DiffusionLLM, prompt: Asked, params: SamplingParams, measured: Measured
) -> Generator[News, None, None]:
    """Yield the canvas after every step, and the text that is then final."""
    tokenizer = llm.tokenizer
    assert tokenizer is not None
    word = cache(lambda token: tokenizer.decode([token], skip_special_tokens=False))
    ends = {*params.stop_token_ids, *(llm.engine.eos_token_ids * (not params.ignore_eos))}
    policy = Policy.resolve(params.diffusion, llm.engine.limits.spec)
    keeps_end, taken = params.include_stop_str_in_output, 0
    text = TextStream(
        tokenizer, params.stop, keeps_end, params.skip_special_tokens, params.min_tokens
    )
    for ids in _timed(llm.watch(prompt, params), measured):
        measured.tokens, measured.forwards = len(ids), measured.forwards + 1
        yield [None if token is None else word(token) for token in ids]
        if not policy.decoder.edits:  # else tokens are final only after the last step
            new = _final(ids[taken:], ends, keeps_end)
            taken += len(new)
            yield text.push(new)
    yield text.push(_final(ids[taken:], ends, keeps_end)) + text.finish()


def _texts(
    llm: DiffusionLLM, prompt: Asked, params: SamplingParams, measured: Measured
) -> Generator[News, None, None]:
    for delta in _timed(llm.stream(prompt, params), measured):
        measured.tokens += len(delta.token_ids)
        measured.forwards = delta.forwards
        yield delta.text


def _timed(items: Iterator[_Item], measured: Measured) -> Iterator[_Item]:
    """Yield items, and measure the time until each, without the pauses of showing it."""
    began = time.perf_counter()
    for item in items:
        measured.seconds += time.perf_counter() - began
        yield item
        began = time.perf_counter()


def _final(ids: list[int | None], ends: Collection[int], keeps_end: bool) -> list[int]:
    """Return the tokens before the first mask, and up to the end token."""
    found: list[int] = []
    for token in ids:
        if token is None or (token in ends and not keeps_end):
            break
        found.append(token)
        if token in ends:
            break
    return found
