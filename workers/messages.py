"""What an engine is asked and what it answers: plain values, without torch.

`pack` makes of each what msgpack and JSON can carry, `unpack` the same value again.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, NamedTuple

if TYPE_CHECKING:
    from diffray.components.params import SamplingParams


class Progress(NamedTuple):
    """The finished blocks all of whose tokens were reported, and the denoising steps they took."""

    blocks: int
    steps: int


_BEGINNING = Progress(0, 0)
RAN: Final = 11  # where a packed update has `ran`


@dataclass(frozen=True, slots=True)
class Resume:
    """Where a request stood elsewhere: enough to go on to the same text, and report only the rest.

    It goes on from the start of the block that was being denoised, so a little is done twice.
    """

    ids: tuple[int, ...] = ()  # all that were reported
    progress: Progress = _BEGINNING
    forwards: int = 0

    @staticmethod
    def after(updates: Iterable["Update"]) -> "Resume":
        """Return what follows all updates of one request, in their order; of none, the start."""
        resume = Resume()
        ids: list[int] = []
        for update in updates:
            ids += update.ids
            resume = Resume((), update.progress, update.forwards)
        return Resume(tuple(ids), resume.progress, resume.forwards)


@dataclass(frozen=True, slots=True)
class Request:
    """What an engine is asked to generate; end tokens end a text unless `ignore_eos`.

    With a `suffix` the text is written between it and the prompt. With `watch` the updates show
    the canvas, after every round. With `resume` it goes on where it stood elsewhere. It shares K/V
    only with requests of the same `cache_salt`.
    """

    uid: int
    prompt: tuple[int, ...]
    params: "SamplingParams"
    suffix: tuple[int, ...] = ()
    watch: bool = False
    resume: Resume | None = None
    cache_salt: str = ""

    def pack(self) -> dict[str, Any]:
        """Return plain values; who passes them on reads `uid`, `prompt` and `params` by name."""
        resume = self.resume
        return {
            "uid": self.uid,
            "prompt": list(self.prompt),
            "params": self.params.model_dump(mode="json"),
            "suffix": list(self.suffix),
            "watch": self.watch,
            "resume": resume and [list(resume.ids), list(resume.progress), resume.forwards],
            "cache_salt": self.cache_salt,
        }

    @staticmethod
    def unpack(packed: dict[str, Any]) -> "Request":
        from diffray.components.params import SamplingParams  # imports torch

        resume = packed["resume"]
        if resume is not None:
            ids, progress, forwards = resume
            resume = Resume(tuple(ids), Progress(*progress), forwards)
        return Request(
            uid=packed["uid"],
            prompt=tuple(packed["prompt"]),
            params=SamplingParams(**packed["params"]),
            suffix=tuple(packed["suffix"]),
            watch=packed["watch"],
            resume=resume,
            cache_salt=packed["cache_salt"],
        )


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
    progress: Progress = _BEGINNING  # what `Resume` needs
    # For each token the most probable ids when it became final; empty unless asked for.
    top_logprobs: list[list[tuple[int, float]]] = field(default_factory=list)
    canvas: list[int | None] | None = None  # of watched requests: what is generated, None: masked
    cached_tokens: int = 0  # of the prompt, those that it did not have to run itself
    # Seconds since its admission, with its first news after that; said by who queues it.
    ran: float | None = None

    def pack(self) -> list[Any]:
        """Return plain values, in the order of the fields."""
        return [
            self.uid,
            self.ids,
            self.steps,
            self.logprobs,
            self.finish_reason,
            self.stop_id,
            self.forwards,
            list(self.progress),
            [[list(pair) for pair in top] for top in self.top_logprobs],
            self.canvas,
            self.cached_tokens,
            self.ran,
        ]

    @staticmethod
    def unpack(packed: list[Any]) -> "Update":
        *plain, progress, tops, canvas, cached, ran = packed
        uid, ids, steps, logprobs, reason, stop_id, forwards = plain
        top_logprobs = [[(token, logprob) for token, logprob in top] for top in tops]
        return Update(
            uid,
            ids,
            steps,
            logprobs,
            reason,
            stop_id,
            forwards,
            Progress(*progress),
            top_logprobs,
            canvas,
            cached,
            ran,
        )


@dataclass(frozen=True, slots=True)
class Stats:
    """How an engine is doing; counts are since it began."""

    running: int
    waiting: int
    free_pages: int
    num_pages: int  # that can be handed out
    preemptions: int
    forwards: int  # of the model, shared ones counted once
    tokens: int  # reported as final
