"""Tokens with their log-probabilities, as OpenAI's two APIs list them."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, Final

from diffray.cluster.api.errors import Json
from diffray.cluster.api.tokens import Tokens
from diffray.cluster.frontend.output import CompletionOutput

_LEAST: Final = -9999.0  # JSON has neither infinity nor NaN; vLLM uses the same value

Ranking = list[tuple[int, float]]
Scored = tuple[int, float, Ranking]  # a token, its log-probability, and the most probable others


def scored(output: CompletionOutput, places: Iterable[int] | None = None) -> Iterator[Scored]:
    """Yield the tokens at some places of an answer, by default at all."""
    for at in range(len(output.token_ids)) if places is None else places:
        top = output.top_logprobs[at] if output.top_logprobs else []
        yield output.token_ids[at], (output.logprobs or [])[at], top


def as_number(logprob: float) -> float:
    return logprob if logprob > _LEAST else _LEAST  # NaN too


@dataclass(slots=True)
class Columns:
    """The lists of a completion; an offset is the start of a token's text in the choice's text."""

    tokens: Tokens
    offset: int
    lists: Json = field(init=False)

    def __post_init__(self) -> None:
        names = "tokens", "token_logprobs", "top_logprobs", "text_offset"
        self.lists = {name: [] for name in names}

    def add(self, token: int, logprob: float | None, top: Ranking) -> None:
        """Add a token; the first of a prompt has no log-probability."""
        text = self.tokens[token][0]
        best = {self.tokens[other][0]: as_number(likely) for other, likely in top}
        known: tuple[Any, Any] = (None, None) if logprob is None else (as_number(logprob), best)
        for column, value in zip(self.lists.values(), (text, *known, self.offset), strict=True):
            column.append(value)
        self.offset += len(text)
