"""Builds a request's parameters from a body: defaults, words as ids, length limits."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from diffray.cluster.api.bodies import GenerationBody
from diffray.cluster.api.errors import invalid, too_long, unavailable
from diffray.cluster.api.settings import GenerationDefaults
from diffray.cluster.control.grammar_pool import GrammarPool, NotStarted
from diffray.cluster.frontend.given import NO_BAD_TOKENS, BadTokens
from diffray.cluster.frontend.text import Tokenizer
from diffray.components.config import InvalidField
from diffray.components.grammar.structured import StructuredOutputs
from diffray.components.grammar.template import Template
from diffray.components.models.advice import told
from diffray.components.params import SamplingParams
from diffray.components.policy import DiffusionParams, Policy
from diffray.workers.admission import CheckedRequest
from diffray.workers.limits import Limits

# Fields with the same meaning in a body, where null means the default.
_SHARED: Final = SamplingParams.model_fields.keys() & GenerationBody.model_fields.keys()


@dataclass(frozen=True, slots=True)
class ParamsBuilder:
    """The server's settings that complete a body."""

    limits: Limits
    tokenizer: Tokenizer | None
    diffusion: DiffusionParams
    defaults: GenerationDefaults

    def params(
        self,
        body: GenerationBody,
        taken: int,
        bad: BadTokens = NO_BAD_TOKENS,
        grammar: bytes = b"",
    ) -> SamplingParams:
        """Return the parameters; prompt and suffix take `taken` positions."""
        if body.stop and self.tokenizer is None:
            raise invalid("stop strings need a tokenizer, and the checkpoint has none", "stop")
        given = {name: value for name in _SHARED if (value := getattr(body, name)) is not None}
        diffusion = self.over_default(body)
        own = {
            "max_tokens": self._max_tokens(body, taken, diffusion, grammar),
            "bad_words": (),
            "bad_token_ids": bad.ids,
            "bad_token_sequences": bad.sequences,
            "structured_outputs": body.structured and body.structured[1],
            "logprobs": body.num_logprobs is not None or body.return_trajectory,
            "top_logprobs": body.num_logprobs or 0,
            "diffusion": diffusion,
        }
        return SamplingParams(**self.defaults.model_dump(exclude_none=True) | given | own)

    async def grammar(
        self, pool: GrammarPool, field: str, outputs: StructuredOutputs, diffusion: DiffusionParams
    ) -> bytes:
        """Return the automaton, or the template of a pinned canvas, for a body's field."""
        if self.tokenizer is None:
            raise invalid(f"{field} needs a tokenizer, and the checkpoint has none", field)
        try:
            return await pool.compiled(outputs, diffusion.slots)
        except InvalidField as error:
            raise invalid(str(error), field) from None
        except NotStarted as error:
            raise unavailable(str(error)) from None

    def about(self) -> dict[str, object]:
        """Return the model's limits and policies, as /v1/models shows them."""
        spec = self.limits.spec
        own = Policy.resolve(DiffusionParams(), spec).options()
        return {
            "max_model_len": self.limits.context,
            "family": spec.family,
            "diffusion": Policy.resolve(DiffusionParams().over(self.diffusion), spec).options(),
            "policies": told(spec.family, own),
        }

    def over_default(self, body: GenerationBody) -> DiffusionParams:
        """Return a body's diffusion parameters, completed by the server's defaults."""
        return body.diffusion.over(self.diffusion)

    def room(self, diffusion: DiffusionParams, taken: int) -> int:
        """Return the most tokens after `taken` positions: up to whole blocks if block-causal.

        A pinned canvas need not be whole blocks, nor what is written token by token.
        """
        room = self.limits.positions(guided=diffusion.cfg_scale > 0) - taken
        policy = Policy.resolve(diffusion, self.limits.spec)
        whole = policy.causal_length and not policy.iteration.next_token
        if whole and diffusion.canvas != "pinned" and not policy.fixed:
            begun = 0 if policy.encodes else taken  # blocks start after the prompt, or at 0
            room -= (room + begun) % policy.block_length
        return room

    def _may_lower(self, body: GenerationBody, diffusion: DiffusionParams) -> bool:
        """Whether an answer may have fewer tokens than were asked for: not if it would differ."""
        fixed = diffusion.canvas == "fixed" or bool(getattr(body, "suffix", None))
        return not body.is_strict and not fixed

    def _max_tokens(
        self, body: GenerationBody, taken: int, diffusion: DiffusionParams, grammar: bytes
    ) -> int:
        wanted, room = body.wanted_tokens, self.room(diffusion, taken)
        context, least = taken + room, body.min_tokens or 0
        if wanted is None and diffusion.canvas == "pinned" and grammar:
            wanted = len(Template.from_bytes(grammar).cells)
        elif wanted is None:
            default = self.defaults.max_tokens or body.default_tokens
            wanted = max(min(default, max(room, 1)), least)
        if wanted > room >= max(least, 1) and self._may_lower(body, diffusion):
            return room
        if wanted > room:
            raise too_long(
                context,
                f"you requested {taken + wanted} tokens ({taken} in the prompt, {wanted} in the "
                "completion). Please reduce the length of the prompt or completion.",
                body.prompt_field,
            )
        return wanted


def long_canvas(body: GenerationBody, checked: CheckedRequest) -> Iterator[str]:
    """Yield a sentence if max_tokens is a canvas on which the answer may well be empty."""
    request, usual = checked.request, checked.limits.spec.canvas_length
    params, given = request.params, request.params.diffusion
    if given.canvas or given.canvas_length or request.suffix or request.grammar:
        return
    decoder = given.decoder
    if decoder is None or not decoder.counts_canvas or params.ignore_eos or params.min_tokens:
        return
    if 0 < 2 * usual < (body.wanted_tokens or 0):
        yield (
            f"max_tokens ({params.max_tokens}) is the length of the canvas with decoder "
            f"{decoder.kind!r}, far above the usual {usual}: lower it if the answer is empty"
        )
