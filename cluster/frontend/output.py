"""The results of a request, with views for notebooks and terminals, and what fills them."""

from bisect import bisect_left
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TypeVar

from diffray.cluster.frontend.text import TextStream, Tokenizer
from diffray.components.config import counted, shortened
from diffray.components.params import SamplingParams
from diffray.workers.messages import Update

_Token = TypeVar("_Token", int, str)


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


class Canvas(list[_Token | None]):
    """The generated part of a canvas, as ids or texts of tokens, None where it is masked.

    The last `drafts` of its tokens are guesses that the next steps verify.
    """

    def __init__(self, tokens: Iterable[_Token | None], drafts: int = 0) -> None:
        super().__init__([*tokens])
        self.drafts = drafts

    @property
    def final(self) -> int:
        """Where the drafts begin; the end, if there are none."""
        return len(self) - self.count(None) - self.drafts if self.drafts else len(self)


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
    canvas: Canvas[int] | None = None
    blocks: int = 0


Followed = Accepted | Delta | RequestOutput  # what a followed request yields, in this order


class Job:
    """The `index`-th choice of a request, filled update by update.

    With `follow` every update makes a delta, even without new tokens.
    """

    def __init__(
        self,
        index: int,
        params: SamplingParams,
        tokenizer: Tokenizer | None,
        follow: bool = False,
        depth: int | None = None,
    ) -> None:
        self.params, self._follow, self._blocks = params, follow, 0
        self.choice = CompletionOutput(index, depth=depth)
        if params.logprobs:
            self.choice.logprobs = []
        if params.top_logprobs:
            self.choice.top_logprobs = []
        self._tokenizer = tokenizer
        self.canvas: Canvas[int] | None = None  # the latest one, with `watch`
        self._text = TextStream(
            tokenizer,
            params.stop,
            params.include_stop_str_in_output,
            params.skip_special_tokens,
            params.min_tokens,
        )
        self._returned = 0, 0, 0  # the lengths of text, ids and `shown` that `news` has returned
        self._begins: list[int] = []  # where each token's text begins, if it has logprobs
        self._seen = 0  # the tokens of which `shown` tells

    @property
    def finished(self) -> bool:
        return self.choice.finish_reason is not None

    def result(self) -> CompletionOutput:
        """Return the choice with the texts of its tokens."""
        if self._tokenizer is not None:
            self.choice.tokens = self._tokenizer.tokens(self.choice.token_ids)
        return self.choice

    def apply(self, update: Update) -> None:
        """Apply an update; a stop string may finish the job before the engine does."""
        choice, ids = self.choice, update.ids
        # An end token is the last of its update; it counts as a token and adds no text.
        is_text = update.stop_id is None or self.params.include_stop_str_in_output
        self._push(ids if is_text else ids[:-1])
        if self._text.stopped is not None:
            ids = ids[: len(self._text.ids) - len(choice.token_ids)]
            choice.finish_reason, choice.stop_reason = "stop", self._text.stopped
        elif update.finish_reason:
            self._text.finish()
            choice.finish_reason, choice.stop_reason = update.finish_reason, update.stop_id
        choice.token_ids += ids
        choice.steps += update.steps[: len(ids)]
        choice.text = self._text.text
        choice.forwards, choice.weights_version = update.forwards, update.version
        # A resumed request has no cache hits.
        choice.cached_tokens = max(choice.cached_tokens, update.cached_tokens)
        choice.approximate = choice.approximate or update.approximate
        if choice.logprobs is not None:
            choice.logprobs += update.logprobs[: len(ids)]
            self._show()
        if choice.top_logprobs is not None:
            choice.top_logprobs += update.top_logprobs[: len(ids)]
        if update.fields:
            choice.fields = {path: FieldOutput(*each) for path, each in update.fields.items()}
        self.canvas = None if update.canvas is None else Canvas(update.canvas, update.drafts)
        self._blocks = update.progress.blocks

    def _push(self, ids: list[int]) -> None:
        if self.choice.logprobs is None:
            self._text.push(ids)
            return
        for token in ids:  # one by one, to see where each begins
            if self._text.stopped is None:
                self._begins.append(self._text.length)
                self._text.push([token])

    def _show(self) -> None:
        """Note which tokens' text is certain by now."""
        choice, tokenizer, seen = self.choice, self._tokenizer, self._seen
        certain = bisect_left(self._begins, len(choice.text), seen)
        self._seen = len(self._begins) if tokenizer is None else certain
        skipped = tokenizer.special if tokenizer and self.params.skip_special_tokens else ()
        shown = range(seen, self._seen)
        choice.shown += [at for at in shown if choice.token_ids[at] not in skipped]

    def news(self) -> Delta | None:
        """Return what became final since the last call, and the canvas if it is watched."""
        choice, (text, ids, shown) = self.choice, self._returned
        self._returned = len(choice.text), len(choice.token_ids), len(choice.shown)
        canvas, self.canvas = self.canvas, None
        quiet = self._returned[:2] == (text, ids) and canvas is None and not self.finished
        if quiet and not self._follow:
            return None
        return Delta(
            index=choice.index,
            text=choice.text[text:],
            token_ids=choice.token_ids[ids:],
            finish_reason=choice.finish_reason,
            forwards=choice.forwards,
            steps=choice.steps[ids:],
            logprobs=None if choice.logprobs is None else choice.logprobs[ids:],
            top_logprobs=None if choice.top_logprobs is None else choice.top_logprobs[ids:],
            shown=choice.shown[shown:],
            fields=choice.fields,
            canvas=canvas,
            blocks=self._blocks,
        )
