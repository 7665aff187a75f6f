"""A copy: another canvas of a sequence, whose windows run in the same forwards as its own."""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from diffray.components.config import InvalidField

if TYPE_CHECKING:
    from torch import Tensor

    from diffray.components.policy import Policy
    from diffray.components.sequence import Sequence


@dataclass(slots=True, eq=False)
class Copy:
    """A row of canvases, and pages of its own where its K/V differ from the sequence's."""

    slot: int
    pages: list[int] = field(default_factory=list)
    pages_P: "Tensor | None" = None  # of its whole canvas, on the host
    covers: tuple[int, int, int] | None = None  # of a draft: the window that its pages are for
    ready: bool = False  # of a draft: whether it was made by the last forward


def check_policy(policy: "Policy") -> None:
    """Refuse parts of a policy whose copies would need more than a canvas of their own.

    For drafts, also refuse decoders whose next steps do not follow from one forward.
    """
    decoder = policy.decoder
    remembers = decoder.gain() is not None
    unknown = decoder.edits or remembers or decoder.measures or decoder.lookahead() > 0
    drafts = policy.speculation is not None
    for name, given, what in (
        ("iteration", policy.iteration.soft, f"iteration {policy.iteration.kind!r} does"),
        ("decoder", drafts and unknown, f"decoder {decoder.kind!r} does"),
        ("cache", policy.cache.follows_masks, f"cache {policy.cache.kind!r} does"),
        ("cfg_scale", policy.cfg_scale > 0, "cfg_scale does"),
    ):
        _refuse(policy, f"diffusion.{name}", given, what)


def check_request(sequence: "Sequence") -> None:
    """Refuse options that make a token depend on others of its block, and rankings."""
    params, policy = sequence.params, sequence.policy
    penalties = params.presence_penalty, params.frequency_penalty, params.repetition_penalty
    for name, given, what in (
        ("diffusion.canvas", sequence.pins is not None, "canvas 'pinned' does"),
        ("structured_outputs", params.structured_outputs is not None, "structured outputs do"),
        ("bad_words", sequence.automaton is not None, "bad_words of several tokens do"),
        ("repetition_penalty", penalties != (0, 0, 1), "penalties do"),
        ("no_repeat_ngram_size", params.no_repeat_ngram_size > 0, "no_repeat_ngram_size does"),
        ("top_logprobs", params.top_logprobs > 0, "top_logprobs does"),
    ):
        _refuse(policy, name, given, what)


def _refuse(policy: "Policy", name: str, given: bool, what: str) -> None:
    if not given:
        return
    if policy.speculation is not None:
        other, advice = "diffusion.speculation", "leave it out, or set speculation to null"
        raise InvalidField(f"{what} not go with {other}; {advice}", name)
    if kind := policy.decoder.lookahead() and policy.decoder.kind:
        raise InvalidField(
            f"{what} not go with decoder {kind!r}; leave it out, or use 'threshold'", name
        )
