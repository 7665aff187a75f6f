"""The results of a request: plain data, with views for notebooks and terminals."""

from dataclasses import dataclass, field

from diffray.components.config import counted, shortened


@dataclass(frozen=True, slots=True)
class FieldOutput:
    """The model's probability for a field of a pinned canvas, and for each option of a choice."""

    probability: float
    options: dict[str, float]  # by their text in the answer; empty if it is not a choice


@dataclass(slots=True, repr=False)
class CompletionOutput:
    """One choice: its text, and each of its tokens.

    `tokens` are their texts, `steps` the steps at which they became final, counted from 0.
    `logprobs` and `top_logprobs` are set if the request has `logprobs`: each token's
    log-probability at that step (given the canvas at that time: not a left-to-right likelihood),
    and the most probable ids of the same distribution, best first. `shown` are then the places of
    the tokens that `text` is made of: no end token, and none after a stop string. With a pinned
    canvas `fields` holds each field by its path, such as `address.city`. `depth` is set if a
    context-free grammar nests its rules without end: it is how deep they were allowed to nest.
    """

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    finish_reason: str | None = None  # stop | length
    stop_reason: str | int | None = None  # the stop string or end token found
    forwards: int = 0
    cached_tokens: int = 0  # prompt tokens read from shared pages
    approximate: bool = False  # whether their K/V were computed on another canvas
    logprobs: list[float] | None = None
    steps: list[int] = field(default_factory=list)
    top_logprobs: list[list[tuple[int, float]]] | None = None
    shown: list[int] = field(default_factory=list)
    fields: dict[str, FieldOutput] | None = None
    tokens: list[str] = field(default_factory=list)  # empty without a tokenizer
    depth: int | None = None
    weights_version: str = ""  # of the weights that wrote all of it

    @property
    def cumulative_logprob(self) -> float | None:
        return None if self.logprobs is None else sum(self.logprobs)

    @property
    def visible(self) -> list[tuple[str, int]]:
        """The texts of the tokens and their steps, without the token that ended the text."""
        ended = isinstance(self.stop_reason, int)
        shown = list(zip(self.tokens, self.steps, strict=False))
        return shown[:-1] if ended else shown

    def __repr__(self) -> str:
        return (
            f"CompletionOutput(index={self.index}, text={shortened(repr(self.text))}, "
            f"{counted(len(self.token_ids), 'token')}, {counted(self.forwards, 'forward')}, "
            f"finish_reason={self.finish_reason!r})"
        )


@dataclass(slots=True, repr=False)
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
    def weights_version(self) -> str | None:
        """The version of the weights; None if choices were written by different ones."""
        found = {choice.weights_version for choice in self.outputs}
        return found.pop() if len(found) == 1 else None

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

    def show(self, *, pace: float = 5.0) -> None:
        """Show how the answer was denoised, at `pace` steps per second at most.

        A notebook shows a picture; a terminal plays it once; elsewhere the text is printed.
        """
        from diffray.cluster.frontend.views import show

        show(self, pace)

    def __repr__(self) -> str:
        prompt = counted(self.prompt_tokens, "token") if self.prompt is None else repr(self.prompt)
        return f"RequestOutput(prompt={shortened(prompt)}, outputs={self.outputs!r})"

    def _repr_html_(self) -> str:
        from diffray.cluster.frontend.views import as_html

        return as_html(self)


@dataclass(frozen=True, slots=True)
class Accepted:
    """A request that has passed its checks, with the most blocks that each choice may have."""

    prompt_tokens: int
    num_blocks: list[int]


@dataclass(frozen=True, slots=True)
class Delta:
    """What became final in one streamed choice since the last delta.

    `steps`, `logprobs` and `top_logprobs` are a CompletionOutput's, of exactly these tokens.
    `shown` are the places in the whole choice of the tokens whose text has become certain. If the
    request is watched, `canvas` is the whole canvas as it is now, None where masked. `blocks`
    counts the finished blocks.
    """

    index: int
    text: str
    token_ids: list[int]
    finish_reason: str | None
    forwards: int  # so far
    steps: list[int]
    logprobs: list[float] | None = None
    top_logprobs: list[list[tuple[int, float]]] | None = None
    shown: list[int] = field(default_factory=list)
    fields: dict[str, FieldOutput] | None = None
    canvas: list[int | None] | None = None
    blocks: int = 0


Followed = Accepted | Delta | RequestOutput  # what a followed request yields, in this order
