"""`diffray generate`: answer one prompt in this process, and print the answer with its counts."""

import sys
import time
from collections.abc import Collection, Generator, Iterator
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Annotated, TypeVar

import typer
from rich.console import Console
from rich.text import Text

from diffray.cluster.cli import flags
from diffray.cluster.cli.commands import refuse
from diffray.cluster.cli.flags import sampling_params
from diffray.cluster.cli.playback import News, can_play, show
from diffray.cluster.frontend.output import Canvas
from diffray.cluster.frontend.text import Messages, TextStream
from diffray.components.checkpoints.demos import DEMOS, EXAMPLE, HUB_ID, NAMES, examples
from diffray.components.config import counted
from diffray.components.params import SamplingParams
from diffray.components.policy import Policy

if TYPE_CHECKING:
    from diffray.cluster.control.llm import DiffusionLLM  # which imports torch

Asked = str | list[int] | Messages
_Item = TypeVar("_Item")


def generate(
    context: typer.Context,
    prompt: Annotated[
        str | None,
        typer.Argument(help="The prompt; - reads it from stdin. The demo models have an example."),
    ] = None,
    *,
    model: flags.Model = "demo",
    watch: Annotated[
        bool, typer.Option("--watch", help="Show how masks turn into text, step by step.")
    ] = False,
    pace: flags.Pace = flags.PACE,
    stats: Annotated[
        bool, typer.Option("--stats", help="Print tokens, forwards and tokens/s on stderr.")
    ] = False,
    answer: flags.Answer,
    raw: flags.Raw = False,
    diffusion: flags.Diffusion,
    settings: flags.Settings = None,
    engine: flags.Engine,
) -> None:
    """Answer one prompt, without a server.

    The prompt is sent as a chat message if the model has a chat template.
    """
    if not watch:
        refuse(context, "without --watch", ("pace",))
    params = sampling_params(answer | diffusion, settings)
    if params.logprobs:
        raise ValueError(
            "the command line prints no logprobs; leave them out, or request them in Python or "
            "through the API of a server"
        )
    text = _read_prompt(prompt, model)
    from diffray.cluster.control.llm import DiffusionLLM

    llm = DiffusionLLM(model, max_num_seqs=1, **engine)
    prepared = as_prompt(llm, text, raw=raw)
    measured = print_answer(llm, prepared, params, pace=pace if watch else None)
    if stats:
        typer.echo(str(measured), err=True)


def _read_prompt(prompt: str | None, model: str) -> str:
    """Return the prompt; without one, print a demo model's example on stderr and return it."""
    if prompt is not None:
        text = sys.stdin.read().removesuffix("\n") if prompt == "-" else prompt
        if not text:
            raise ValueError("the prompt is empty; give a text")
        return text
    if model not in NAMES:
        if "/" not in model or not HUB_ID.fullmatch(model):
            from diffray.components.checkpoints.folder import resolve

            resolve(model)  # reports a wrong path first; downloads nothing
        raise typer.BadParameter("give a prompt, or - to read it from stdin", param_hint="PROMPT")
    example = EXAMPLE if model in DEMOS else examples(model)[0]
    console = Console(stderr=True)
    console.print(Text(example), soft_wrap=not console.is_terminal)  # words are broken only there
    return example


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


def as_prompt(llm: "DiffusionLLM", text: str, *, raw: bool) -> Asked:
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
    llm: "DiffusionLLM", prompt: Asked, params: SamplingParams, *, pace: float | None
) -> Measured:
    """Print the answer; with a pace, show every step if the terminal can."""
    measured = Measured()
    watch = pace is not None and can_play(sys.stdout)
    show((steps if watch else _texts)(llm, prompt, params, measured), sys.stdout, pace)
    return measured


def steps(
    llm: "DiffusionLLM", prompt: Asked, params: SamplingParams, measured: Measured
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
        yield Canvas((None if token is None else word(token) for token in ids), ids.drafts)
        if not policy.decoder.edits:  # else tokens are final only after the last step
            new = _final(ids[taken : ids.final], ends, keeps_end)
            taken += len(new)
            yield text.push(new)
    yield text.push(_final(ids[taken:], ends, keeps_end)) + text.finish()


def _texts(
    llm: "DiffusionLLM", prompt: Asked, params: SamplingParams, measured: Measured
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
