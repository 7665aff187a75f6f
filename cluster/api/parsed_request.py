"""One parsed HTTP request: its prompts, its choices, and the name of its answer."""

import asyncio
import secrets
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import diffray
from diffray.cluster.api.bodies import ChatBody, CompletionBody
from diffray.cluster.api.errors import invalid
from diffray.cluster.api.run import Choice
from diffray.components.params import SamplingParams
from diffray.workers.admission import Limits, check_choices
from diffray.workers.job import Job
from diffray.workers.messages import Request
from diffray.workers.text import Tokenizer

_MOST_LOGPROBS: Final = 2**18  # of one request


@dataclass(frozen=True, slots=True)
class Prompt:
    """`text` is kept if the answer repeats it."""

    ids: tuple[int, ...]
    text: str | None = None


@dataclass(frozen=True, slots=True)
class Ask:
    """The data of every answer, streamed or whole."""

    body: ChatBody | CompletionBody
    model: str
    prompts: list[Prompt]
    choices: list[Choice]
    end_ids: frozenset[int]  # the model's own, which are not reported as stop reasons
    id: str = ""
    created: int = field(default_factory=lambda: int(time.time()))

    def envelope(self, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": self.id,
            "object": kind,
            "created": self.created,
            "model": self.model,
            "system_fingerprint": f"diffray-{diffray.__version__}",
            "choices": choices,
        }

    def usage(self) -> dict[str, Any]:
        """Return the token counts so far, including an end token, up to a stop string."""
        asked = sum(len(prompt.ids) for prompt in self.prompts)
        written = sum(len(choice.output.token_ids) for choice in self.choices)
        first = {choice.prompt: choice.output for choice in reversed(self.choices)}
        return {
            "prompt_tokens": asked,
            "prompt_tokens_details": {
                "cached_tokens": sum(output.cached_tokens for output in first.values())
            },
            "completion_tokens": written,
            "total_tokens": asked + written,
        }

    def diffusion(self) -> dict[str, float]:
        """Return the sum of the choices' forwards."""
        forwards = sum(choice.output.forwards for choice in self.choices)
        written = sum(len(choice.output.token_ids) for choice in self.choices)
        return {"forwards": forwards, "tokens_per_forward": round(written / max(forwards, 1), 3)}

    def stop_reason(self, choice: Choice) -> str | int | None:
        """Return the stop string or id found; None for the model's own end token, as in vLLM."""
        reason = choice.output.stop_reason
        return None if reason in self.end_ids else reason


async def make_choices(
    prompts: Iterable[Prompt],
    params: Iterable[SamplingParams],
    limits: Limits,
    tokenizer: Tokenizer | None,
    *,
    suffix: tuple[int, ...] = (),
    watch: bool = False,
    cache_salt: str = "",
) -> list[Choice]:
    """Return every choice of every prompt, or refuse all of them with a reason."""
    choices: list[Choice] = []
    for number, (prompt, wish) in enumerate(zip(prompts, params, strict=True)):
        request = Request(0, prompt.ids, wish, suffix=suffix, watch=watch, cache_salt=cache_salt)
        # Engines outlive this process's counters, so uids are drawn.
        for index, checked in enumerate(check_choices(request, limits, _drawn_uid)):
            job = Job(index, checked.request.params, tokenizer)
            choices.append(Choice(len(choices), number, index == 0, checked, job))
        await asyncio.sleep(0)  # there may be a thousand prompts
    return choices


def _drawn_uid() -> int:
    return secrets.randbits(53)


def refuse_too_many_logprobs(params: Sequence[SamplingParams]) -> None:
    """Refuse too many log-probabilities: an answer is built and sent as a whole."""
    entries = sum(each.n * each.max_tokens * (each.top_logprobs + 1) for each in params)
    if entries > _MOST_LOGPROBS:
        raise invalid(
            f"this asks for up to {entries} log-probabilities (choices x max_tokens x (1 + "
            f"top_logprobs)), more than {_MOST_LOGPROBS}; lower one or send several requests",
            "logprobs",
        )
