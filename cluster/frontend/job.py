"""One choice in progress: turns the engine's updates into token ids and text."""

from bisect import bisect_left

from diffray.cluster.frontend.output import CompletionOutput, Delta, FieldOutput
from diffray.cluster.frontend.text import TextStream, Tokenizer
from diffray.components.params import SamplingParams
from diffray.workers.messages import Update


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
        self.canvas: list[int | None] | None = None  # the latest one, with `watch`
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
        self.canvas, self._blocks = update.canvas, update.progress.blocks

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
