"""Turns forbidden words into forbidden tokens."""

from collections.abc import Iterable
from typing import Final, NamedTuple

from diffray.cluster.frontend.text import Tokenizer
from diffray.components.config import InvalidField
from diffray.components.params import SamplingParams


class BadTokens(NamedTuple):
    """Tokens that must not be generated: single ones, and sequences of several."""

    ids: tuple[int, ...] = ()
    sequences: tuple[tuple[int, ...], ...] = ()


NO_BAD_TOKENS: Final = BadTokens()


def bad_tokens(words: Iterable[str], tokenizer: Tokenizer | None) -> BadTokens:
    """Return the tokens of words, both at the start of a text and after a space."""
    found: dict[tuple[int, ...], None] = {}
    for word in words:
        if tokenizer is None:
            raise InvalidField(
                "bad_words need a tokenizer, and the checkpoint has none", "bad_words"
            )
        own, spaced = (
            tuple(tokenizer.encode(text, add_special_tokens=False)) for text in (word, f" {word}")
        )
        if not own:
            raise InvalidField(
                f"bad_words: {word[:100]!r} has no tokens; leave it out", "bad_words"
            )
        found[own] = None
        if not _contains(spaced, own):
            found[spaced] = None
    return BadTokens(
        tuple(ids[0] for ids in found if len(ids) == 1), tuple(ids for ids in found if len(ids) > 1)
    )


def with_bad_tokens(params: SamplingParams, tokenizer: Tokenizer | None) -> SamplingParams:
    """Return the parameters with their bad words as tokens."""
    if not params.bad_words:
        return params
    ids, sequences = bad_tokens(params.bad_words, tokenizer)
    tokens = {
        "bad_words": (),
        "bad_token_ids": params.bad_token_ids + ids,
        "bad_token_sequences": params.bad_token_sequences + sequences,
    }
    return params.model_copy(update=tokens)


def _contains(ids: tuple[int, ...], part: tuple[int, ...]) -> bool:
    return any(ids[at : at + len(part)] == part for at in range(len(ids) - len(part) + 1))
