"""One answer on the terminal: streamed as it becomes final, or played back step by step."""

import sys
import time
from dataclasses import dataclass
from functools import cache

from diffray.cluster.cli.playback import Canvas, Playback, can_play, without_echo
from diffray.cluster.control.llm import DiffusionLLM
from diffray.components.config import counted
from diffray.components.params import SamplingParams
from diffray.components.policy import Policy
from diffray.workers.text import Messages, TextStream


@dataclass(frozen=True, slots=True)
class Measured:
    """An answer's counts, with its end token; the time includes the prompt, not the loading."""

    tokens: int
    forwards: int
    seconds: float

    def __str__(self) -> str:
        return (
            f"{counted(self.tokens, 'token')}, {counted(self.forwards, 'forward')}, "
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
    llm: DiffusionLLM, prompt: str | Messages, params: SamplingParams, *, pace: float | None
) -> Measured:
    """Print the answer; with a pace, show every step if the terminal can."""
    if pace is not None and can_play(sys.stdout):
        with without_echo(), Playback(sys.stdout, pace) as shown:
            return play(llm, prompt, params, shown)
    began = time.perf_counter()
    tokens = forwards = 0
    for delta in llm.stream(prompt, params):
        sys.stdout.write(delta.text)
        sys.stdout.flush()
        tokens, forwards = tokens + len(delta.token_ids), delta.forwards
    sys.stdout.write("\n")
    return Measured(tokens, forwards, time.perf_counter() - began)


def play(
    llm: DiffusionLLM, prompt: str | Messages, params: SamplingParams, shown: Playback
) -> Measured:
    """Show every step of the answer; pauses are not measured."""
    found, seconds, steps = _Found(llm, params), 0.0, 0
    began = time.perf_counter()
    for ids in llm.watch(prompt, params):
        seconds, steps = seconds + time.perf_counter() - began, steps + 1
        canvas, text = found.after(ids)
        shown.step(canvas)
        shown.say(text)
        began = time.perf_counter()
    shown.say(found.rest())
    shown.finish()
    return Measured(len(ids), steps, seconds)


class _Found:
    """Decodes an answer's canvases, and its text as far as it is final."""

    def __init__(self, llm: DiffusionLLM, params: SamplingParams) -> None:
        tokenizer = llm.tokenizer
        assert tokenizer is not None
        self._keeps_end = params.include_stop_str_in_output
        self._ends = {*params.stop_token_ids, *(llm.engine.eos_token_ids * (not params.ignore_eos))}
        policy = Policy.resolve(params.diffusion, llm.engine.limits.spec)
        self._edits = policy.decoder.edits  # then tokens are final only after the last step
        self._word = cache(lambda token: tokenizer.decode([token], skip_special_tokens=False))
        self._text = TextStream(
            tokenizer,
            params.stop,
            params.include_stop_str_in_output,
            params.skip_special_tokens,
            params.min_tokens,
        )
        self._ids: list[int | None] = []
        self._taken = 0  # tokens whose text was taken

    def after(self, ids: list[int | None]) -> tuple[Canvas, str]:
        """Return a canvas as texts, and the text that it adds to the answer."""
        self._ids = ids
        canvas = [None if token is None else self._word(token) for token in ids]
        return canvas, "" if self._edits else self._take()

    def rest(self) -> str:
        """Return the text that is left, after the last canvas."""
        return self._take() + self._text.finish()

    def _take(self) -> str:
        new: list[int] = []
        for token in self._ids[self._taken :]:
            if token is None or (token in self._ends and not self._keeps_end):
                break
            new.append(token)
            if token in self._ends:
                break
        self._taken += len(new)
        return self._text.push(new)
