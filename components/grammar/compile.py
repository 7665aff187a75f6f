"""From a regular expression and a tokenizer's vocabulary to an automaton over token ids."""

from collections import defaultdict
from collections.abc import Collection
from functools import cached_property
from typing import TYPE_CHECKING, Any, Final

from diffray.components.config import InvalidField
from diffray.components.grammar.automaton import Automaton, build
from diffray.components.grammar.structured import StructuredOutputs

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Vocabulary = dict[bytes, list[int]]

_KEPT: Final = 64

_PRINTABLE: Final = (*range(33, 127), *range(161, 173), *range(174, 256))


class Grammars:
    """Compiles what requests say about their texts, and keeps what it has compiled."""

    def __init__(
        self, tokenizer: "PreTrainedTokenizerBase", end_ids: Collection[int], vocab_size: int
    ) -> None:
        self._tokenizer, self._end_ids, self._vocab_size = tokenizer, end_ids, vocab_size
        self._found: dict[str, bytes] = {}

    @cached_property
    def _vocabulary(self) -> Vocabulary:
        return vocabulary_of(self._tokenizer)

    def compile(self, outputs: StructuredOutputs) -> bytes:
        """Return the automaton of these texts, as bytes; raises InvalidField if there is none."""
        pattern = outputs.pattern
        if (found := self._found.get(pattern)) is None:
            automaton = compile_regex(pattern, self._vocabulary, self._end_ids, self._vocab_size)
            found = self._found[pattern] = automaton.to_bytes()
            if len(self._found) > _KEPT:
                del self._found[next(iter(self._found))]
        return found


def compile_regex(
    regex: str, vocabulary: Vocabulary, end_ids: Collection[int], vocab_size: int
) -> Automaton:
    """Return the automaton of the texts that match as a whole; ValueError if there is none."""
    import outlines_core

    end, *_ = end_ids
    words = outlines_core.Vocabulary(end, vocabulary)
    try:
        index = outlines_core.Index(regex, words)
    except ValueError as error:
        reason = " ".join(str(error).split())[-200:]
        raise InvalidField(f"structured outputs: {reason}", "structured_outputs") from None
    return build(
        index.get_transitions(),
        index.get_initial_state(),
        index.get_final_states(),
        end_ids,
        vocab_size,
    )


def vocabulary_of(tokenizer: "PreTrainedTokenizerBase") -> Vocabulary:
    """Return the ids of each text, as bytes; special tokens have none."""
    added: dict[int, Any] = tokenizer.added_tokens_decoder
    names = [str(name) for name in tokenizer.convert_ids_to_tokens([*range(len(tokenizer))])]
    spelled = _by_bytes if _has_byte_letters(names) else _by_pieces
    found: Vocabulary = defaultdict(list)
    for token_id, name in enumerate(names):
        if token_id in added:
            if not added[token_id].special:
                found[added[token_id].content.encode()].append(token_id)
        elif name and (text := spelled(name)):
            found[text].append(token_id)
    return dict(found)


def byte_letters() -> dict[str, int]:
    """Return GPT-2's letters for bytes: printable ones are their own, the others follow 255."""
    letters = {chr(value): value for value in _PRINTABLE}
    others = (value for value in range(256) if value not in _PRINTABLE)
    return letters | {chr(256 + at): value for at, value in enumerate(others)}


_LETTERS: Final = byte_letters()


def _has_byte_letters(names: list[str]) -> bool:
    return "\u0120" in names or not any("\u2581" in name for name in names)


def _by_bytes(name: str) -> bytes:
    try:
        return bytes(_LETTERS[letter] for letter in name)
    except KeyError:
        return b""


def _by_pieces(name: str) -> bytes:
    """Return the text of one of SentencePiece's pieces."""
    if len(name) == 6 and name.startswith("<0x") and name.endswith(">"):
        return bytes([int(name[3:5], 16)])
    return name.replace("\u2581", " ").encode()
