"""The template of a pinned canvas: a schema's literals as tokens, and a slot for each field.

A slot has positions for the longest value; those that a value does not need are removed from the
canvas before any value is decided, so that the model fills a text without holes.
"""

import json
from base64 import b64decode, b64encode
from collections.abc import Callable
from collections.abc import Sequence as Items
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import TYPE_CHECKING, Final

from diffray.components.config import InvalidField
from diffray.components.grammar.automaton import UNREACHABLE, Automaton
from diffray.components.grammar.bad_words import restricted
from diffray.components.grammar.json_fields import Field, Part

if TYPE_CHECKING:
    from diffray.components.grammar.compile import Vocabulary

LONGEST: Final = 4096  # positions of a canvas
_KEPT: Final = 256

Encode = Callable[[str], list[int]]
Options = tuple[tuple[int, ...], ...]  # tokens of each


@dataclass(frozen=True, slots=True, eq=False)
class Slot:
    """The positions of one field. An end token among them marks an unused position."""

    path: str
    automaton: Automaton
    following: int  # the token after the slot, which the model expects where a value ends
    options: tuple[str, ...] = ()  # of a choice
    tokens: Options = ()


@dataclass(frozen=True, slots=True, eq=False)
class Template:
    """A template of answers: token ids, and -1 - n at the positions of slot n."""

    cells: tuple[int, ...]  # the last one is an end token
    slots: tuple[Slot, ...]

    @property
    def end_id(self) -> int:
        return self.cells[-1]

    def to_bytes(self) -> bytes:
        """Return it as JSON."""
        slots = [
            {
                "path": slot.path,
                "automaton": _packed(slot.automaton),
                "following": slot.following,
                "options": slot.options,
                "tokens": slot.tokens,
            }
            for slot in self.slots
        ]
        return json.dumps({"cells": self.cells, "slots": slots}).encode()

    @staticmethod
    @lru_cache(_KEPT)
    def from_bytes(data: bytes, banned: frozenset[int] = frozenset()) -> "Template":
        """Return the template in which slots never have the banned tokens."""
        found = json.loads(data)
        slots = (
            Slot(
                slot["path"],
                restricted(b64decode(slot["automaton"]), banned, ()),
                slot["following"],
                tuple(slot["options"]),
                tuple(map(tuple, slot["tokens"])),
            )
            for slot in found["slots"]
        )
        return Template(tuple(found["cells"]), tuple(slots))


@lru_cache(_KEPT)
def _packed(automaton: Automaton) -> str:
    return b64encode(automaton.to_bytes()).decode()


def lay_out(
    parts: Items[Part],
    slot_length: int,
    end_id: int,
    encode: Encode,
    automaton_of: Callable[[Field, Options], Automaton],
) -> Template:
    """Return the template of literals and fields; raises InvalidField if there is none.

    `automaton_of` returns a field's automaton, given the tokens of its texts, if they are few.
    """
    cells: list[int] = []
    slots: list[Slot] = []
    laid = [encode(part) if isinstance(part, str) else part for part in parts]
    for part, after in pairwise([*laid, [end_id]]):
        if isinstance(part, list):
            cells += part
            continue
        options = tuple(tuple(encode(text)) for text in part.texts)
        automaton = automaton_of(part, options)
        size = _size(part, automaton, options, slot_length)
        cells += [-1 - len(slots)] * size
        following = after[0] if isinstance(after, list) else end_id
        named = (part.texts, options) if part.choice else ()
        slots.append(Slot(part.path, automaton, following, *named))
    if not slots:
        raise InvalidField(
            "a pinned canvas needs a field to decide, and this schema allows one answer only",
            "structured_outputs",
        )
    if len(cells) >= LONGEST:
        raise InvalidField(
            f"the pinned canvas has {len(cells)} positions, and {LONGEST} are the most; ask for "
            "fewer fields or a shorter diffusion.slot_length",
            "structured_outputs",
        )
    return Template((*cells, end_id), tuple(slots))


def _size(part: Field, automaton: Automaton, options: Options, slot_length: int) -> int:
    """Return a slot's positions: for its longest text, or `slot_length`, or more if needed."""
    if automaton.shortest >= UNREACHABLE:
        raise InvalidField(
            f"no value of {part.path!r} can be written with this model's tokens",
            "structured_outputs",
        )
    if options:
        return max(map(len, options))
    return max(_longest(automaton, slot_length), automaton.shortest - 1, 1)


@lru_cache(_KEPT)
def _longest(automaton: Automaton, most: int) -> int:
    """Return how many tokens the longest value takes, or `most` if that is less."""
    states = {0}
    for length in range(most):
        states = {
            following
            for state in states
            for number, following in zip(
                automaton.set_QD[state].tolist(), automaton.next_QD[state].tolist(), strict=True
            )
            if following != automaton.end and automaton.member_SC[number].any()
        }
        if not states:
            return length
    return most


def spell(
    text: str, own: list[int], vocabulary: "Vocabulary", spelled: dict[int, bytes]
) -> list[int]:
    """Return a literal's tokens: the tokenizer's own if they spell it, else the longest ones."""
    whole = text.encode()
    if b"".join(spelled.get(token, b"") for token in own) == whole:
        return own
    found, longest = [], max(map(len, vocabulary))
    while whole:
        word = next(
            (whole[:n] for n in range(min(longest, len(whole)), 0, -1) if whole[:n] in vocabulary),
            None,
        )
        if word is None:
            raise InvalidField(
                f"{text[:50]!r} cannot be written with this model's tokens", "structured_outputs"
            )
        found.append(vocabulary[word][0])
        whole = whole[len(word) :]
    return found
