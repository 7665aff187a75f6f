"""Builds a request's parameters from a body: defaults, words as ids, length limits."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TypeVar

from diffray.cluster.api.bodies import ChatBody, CompletionBody, GenerationBody
from diffray.cluster.api.defaults import CHAT_TOKENS, COMPLETION_TOKENS, GenerationDefaults
from diffray.cluster.api.errors import ApiError, invalid
from diffray.components.params import SamplingParams
from diffray.components.policy import DiffusionParams
from diffray.workers.admission import Limits
from diffray.workers.text import Tokenizer

Number = TypeVar("Number", int, float)


@dataclass(frozen=True, slots=True)
class ParamsBuilder:
    """The server's settings that complete a body."""

    limits: Limits
    tokenizer: Tokenizer | None
    diffusion: DiffusionParams
    defaults: GenerationDefaults

    def params(
        self, body: ChatBody | CompletionBody, taken: int, bad_ids: tuple[int, ...] = ()
    ) -> SamplingParams:
        """Return the parameters; prompt and suffix take `taken` positions."""
        diffusion = body.diffusion.over(self.diffusion)
        if isinstance(body, ChatBody):
            logprobs, top_logprobs = body.logprobs, body.top_logprobs
        else:
            logprobs, top_logprobs = body.logprobs is not None, body.logprobs or 0
        default = self.defaults
        return SamplingParams(
            n=body.n,
            max_tokens=self._max_tokens(body, taken, diffusion),
            min_tokens=body.min_tokens,
            temperature=_first(body.temperature, default.temperature, 0.0),
            top_p=_first(body.top_p, default.top_p, 1.0),
            top_k=_first(body.top_k, default.top_k, 0),
            seed=body.seed,
            stop=tuple(body.stop),
            include_stop_str_in_output=body.include_stop_str_in_output,
            stop_token_ids=tuple(body.stop_token_ids),
            ignore_eos=body.ignore_eos,
            logit_bias=body.logit_bias,
            bad_token_ids=bad_ids,
            allowed_token_ids=tuple(body.allowed_token_ids),
            logprobs=logprobs or body.return_trajectory,
            top_logprobs=top_logprobs,
            skip_special_tokens=body.skip_special_tokens,
            diffusion=diffusion,
        )

    def context(self, diffusion: DiffusionParams) -> int:
        """Return the maximum canvas length: whole blocks with block-causal attention."""
        limits = self.limits
        pages = limits.num_pages // (2 if diffusion.cfg_scale > 0 else 1)
        positions = min(limits.context, pages * limits.page_size)
        if limits.spec.block_causal:
            positions -= positions % (diffusion.block_length or limits.spec.block_length)
        return positions

    def _max_tokens(
        self, body: ChatBody | CompletionBody, taken: int, diffusion: DiffusionParams
    ) -> int:
        context = self.context(diffusion)
        asked = _asked(body)
        if asked is None:
            usual = CHAT_TOKENS if isinstance(body, ChatBody) else COMPLETION_TOKENS
            default = self.defaults.max_tokens or usual
            asked = max(min(default, max(context - taken, 1)), body.min_tokens)
        if taken + asked > context:
            raise ApiError(
                400,
                f"This model's maximum context length is {context} tokens. However, you "
                f"requested {taken + asked} tokens ({taken} in the prompt, {asked} in the "
                "completion). Please reduce the length of the prompt or completion.",
                param="messages" if isinstance(body, ChatBody) else "prompt",
                code="context_length_exceeded",
            )
        return asked

    def bad_ids(self, words: Iterable[str]) -> Iterable[int]:
        """Return the ids of words, at the start of a text and after a space."""
        for word in words:
            if self.tokenizer is None:
                raise invalid(
                    "bad_words need a tokenizer, and the checkpoint has none", "bad_words"
                )
            ids = self.tokenizer.encode(word, add_special_tokens=False)
            spaced = self.tokenizer.encode(f" {word}", add_special_tokens=False)
            if len(ids) != 1 or (len(spaced) > 1 and ids[0] not in spaced):
                raise invalid(
                    f"bad_words: {word[:100]!r} is not a single token of this model, and only "
                    "single ones can be forbidden",
                    "bad_words",
                )
            yield ids[0]
            if len(spaced) == 1:
                yield spaced[0]


def _asked(body: GenerationBody) -> int | None:
    """Return max_tokens under either of its names."""
    newer = body.max_completion_tokens if isinstance(body, ChatBody) else None
    if newer is not None and body.max_tokens not in (None, newer):
        raise invalid(
            f"max_tokens ({body.max_tokens}) and max_completion_tokens ({newer}) mean the same; "
            "send one of them",
            "max_completion_tokens",
        )
    return body.max_tokens if newer is None else newer


def _first(*given: Number | None) -> Number:
    return next(each for each in given if each is not None)
