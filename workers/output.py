"""The results of a request."""

from dataclasses import dataclass, field


@dataclass(slots=True)
class CompletionOutput:
    """One choice. `logprobs` and `steps` are set if the request has `logprobs`.

    They hold each token's log-probability at the step at which it became final (given the canvas
    at that time: not a left-to-right likelihood), and that step, counted from 0. `top_logprobs`
    holds the most probable ids of the same distribution, best first.
    """

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    finish_reason: str | None = None  # stop | length
    stop_reason: str | int | None = None  # the stop string or end token found
    forwards: int = 0
    cached_tokens: int = 0  # prompt tokens read from shared pages
    logprobs: list[float] | None = None
    steps: list[int] | None = None
    top_logprobs: list[list[tuple[int, float]]] | None = None

    @property
    def cumulative_logprob(self) -> float | None:
        return None if self.logprobs is None else sum(self.logprobs)


@dataclass(slots=True)
class RequestOutput:
    """The answer to one prompt; `forwards` sums over its choices."""

    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]

    @property
    def finished(self) -> bool:
        return all(choice.finish_reason for choice in self.outputs)

    @property
    def forwards(self) -> int:
        return sum(choice.forwards for choice in self.outputs)

    @property
    def prompt_tokens(self) -> int:
        return len(self.prompt_token_ids)

    @property
    def cached_tokens(self) -> int:
        """Prompt tokens that the first choice read from shared pages."""
        return self.outputs[0].cached_tokens

    @property
    def completion_tokens(self) -> int:
        return sum(len(choice.token_ids) for choice in self.outputs)

    @property
    def tokens_per_forward(self) -> float:
        return self.completion_tokens / max(self.forwards, 1)


@dataclass(frozen=True, slots=True)
class Delta:
    """What became final in one streamed choice since the last delta.

    `logprobs`, `steps` and `top_logprobs` are a CompletionOutput's, of exactly these tokens.
    `canvas` is all of it as it stands, None where masked, if the request is watched.
    """

    index: int
    text: str
    token_ids: list[int]
    finish_reason: str | None
    forwards: int  # so far
    logprobs: list[float] | None = None
    steps: list[int] | None = None
    top_logprobs: list[list[tuple[int, float]]] | None = None
    canvas: list[int | None] | None = None
