"""What an engine is asked and what it answers: plain values, without torch."""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from diffray.components.params import SamplingParams


@dataclass(frozen=True, slots=True)
class Request:
    """What an engine is asked to generate; end tokens end a text unless `ignore_eos`."""

    uid: int
    prompt: tuple[int, ...]
    params: "SamplingParams"


@dataclass(frozen=True, slots=True)
class Update:
    """News of one request: tokens that became final since the last, always a left prefix."""

    uid: int
    ids: list[int] = field(default_factory=list)
    steps: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    finish_reason: str | None = None  # stop | length
    stop_id: int | None = None  # the end token, once it was found: the last of all ids
    forwards: int = 0  # that it took part in so far
