"""From a regular expression and a tokenizer's vocabulary to an automaton over token ids."""

import os
from collections import defaultdict
from collections.abc import Callable, Collection
from collections.abc import Sequence as Items
from contextlib import suppress
from dataclasses import replace
from functools import cached_property
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np

import diffray
from diffray.components.config import InvalidField
from diffray.components.grammar.automaton import Automaton, build, of_texts
from diffray.components.grammar.context_free import DEEPEST, bounded
from diffray.components.grammar.expressions import over_bytes, too_large
from diffray.components.grammar.gbnf import read_grammar
from diffray.components.grammar.json_fields import Field
from diffray.components.grammar.structured import StructuredOutputs
from diffray.components.grammar.template import Encode, Options, Template, lay_out, spell

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Vocabulary = dict[bytes, list[int]]
How = Callable[[str, Vocabulary, Collection[int], int], Automaton]

# The cost of a step grows with an automaton's edges: this many take some milliseconds per block.
MOST_EDGES: Final = 2**18

_KEPT: Final = 1024
_KEPT_ON_DISK: Final = 256

_MADE: Final = 4  # the compiler's version; files of other versions are not read from disk

_PRINTABLE: Final = (*range(33, 127), *range(161, 173), *range(174, 256))


class Grammars:
    """Compiles the structured outputs of requests, and caches the results in memory and on disk.

    Pinned canvases need `encode`, which tokenizes a text verbatim.
    """

    def __init__(
        self,
        vocabulary: Vocabulary,
        end_ids: Items[int],
        vocab_size: int,
        encode: Encode | None = None,
    ) -> None:
        self._vocabulary, self._end_ids, self._vocab_size = vocabulary, end_ids, vocab_size
        self._encode = encode
        self._found: dict[str, bytes] = {}
        tokens = repr((sorted(vocabulary.items()), sorted(end_ids), vocab_size))
        self._salt = f"{diffray.__version__} {_MADE} {tokens}".encode()

    def compile(self, outputs: StructuredOutputs, slot_length: int | None = None) -> bytes:
        """Return the automaton of these texts, as bytes; raises InvalidField if there is none.

        With a `slot_length` it is the template of their pinned canvas.
        """
        if slot_length is None:
            kind, how = self._how(outputs)
            text = outputs.grammar or outputs.pattern
            key = f"{kind} {text}"
            return self._kept(key, lambda: self._on_disk(key, how, text))
        key = f"{slot_length} {outputs.model_dump_json()}"
        return self._kept(key, lambda: self._lay_out(outputs, slot_length).to_bytes())

    @staticmethod
    def _how(outputs: StructuredOutputs) -> tuple[str, How]:
        if outputs.grammar is not None:
            return "grammar", compile_grammar
        if outputs.tool_calls is not None and outputs.tool_calls.text:
            return "text", compile_text
        return "regex", compile_regex

    def prepare(self) -> None:
        """Do the one-time work that the first request would wait for."""
        compile_regex("a", {b"a": [0]}, (1,), 2)
        _ = self._slots, self._spelled

    def _lay_out(self, outputs: StructuredOutputs, slot_length: int) -> Template:
        encode = self._encode
        assert encode is not None
        return lay_out(
            outputs.parts,
            slot_length,
            self._end_ids[0],
            lambda text: spell(text, encode(text), self._vocabulary, self._spelled),
            self._of_slot,
        )

    def _of_slot(self, field: Field, options: Options) -> Automaton:
        """Return the automaton of a field's values; options are written in the tokenizer's tokens.

        So an answer has the tokens by which options are compared.
        """
        if field.choice:
            states = len({text[:stop] for text in options for stop in range(len(text))})
            if states * len({text[0] for text in options}) > MOST_EDGES:  # a lower bound
                raise too_large()
            return _limited(of_texts(options, self._end_ids[:1], self._vocab_size))
        return Automaton.from_bytes(self._slots.compile(StructuredOutputs(regex=field.regex)))

    @cached_property
    def _slots(self) -> "Grammars":
        """Compiles the values of slots, where one end token marks unused positions."""
        return Grammars(self._vocabulary, self._end_ids[:1], self._vocab_size)

    @cached_property
    def _spelled(self) -> dict[int, bytes]:
        return {token: text for text, ids in self._vocabulary.items() for token in ids}

    def _kept(self, key: str, make: Callable[[], bytes]) -> bytes:
        found = self._found.pop(key, None)
        self._found[key] = make() if found is None else found  # as the most recently used
        if len(self._found) > _KEPT:
            del self._found[next(iter(self._found))]
        return self._found[key]

    def _on_disk(self, key: str, how: How, text: str) -> bytes:
        name = sha256(self._salt + key.encode()).hexdigest()
        home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        file = home / "diffray/grammars" / name
        with suppress(OSError):
            found = file.read_bytes()
            file.touch()  # as the most recently used
            return found
        automaton = how(text, self._vocabulary, self._end_ids, self._vocab_size)
        found = automaton.to_bytes()
        with suppress(OSError):  # without a disk it is compiled each time
            _store(file, found)
        return found


def _store(file: Path, content: bytes) -> None:
    """Write a file atomically; remove the oldest files beside it."""
    file.parent.mkdir(parents=True, exist_ok=True)
    part = file.with_suffix(f".{os.getpid()}")
    part.write_bytes(content)
    part.rename(file)
    beside = sorted(file.parent.iterdir(), key=lambda each: each.stat().st_mtime)
    for old in beside[:-_KEPT_ON_DISK]:
        old.unlink()


def compile_regex(
    regex: str, vocabulary: Vocabulary, end_ids: Collection[int], vocab_size: int
) -> Automaton:
    """Return the automaton of the texts that match as a whole; InvalidField if there is none."""
    return _over_tokens(*over_bytes(regex), vocabulary, end_ids, vocab_size)


def compile_text(
    regex: str, vocabulary: Vocabulary, end_ids: Collection[int], vocab_size: int
) -> Automaton:
    """Return the automaton of texts that may be cut by a limit before they call functions."""
    return compile_regex(regex, vocabulary, end_ids, vocab_size).cut_at_first()


def compile_grammar(
    grammar: str, vocabulary: Vocabulary, end_ids: Collection[int], vocab_size: int
) -> Automaton:
    """Return the automaton of a grammar's texts, as deep as the size limit allows."""
    found = list(bounded(read_grammar(grammar)))
    for next_BQ, accepting_Q, depth in reversed(found):
        if not accepting_Q.any():
            break
        with suppress(InvalidField):  # too large
            automaton = _over_tokens(next_BQ, accepting_Q, vocabulary, end_ids, vocab_size)
            return replace(automaton, depth=depth)
    if found and found[-1].depth in (None, DEEPEST - 1) and not found[-1].accepting_Q.any():
        raise InvalidField(
            f"grammar: none of its texts ends within {DEEPEST} nested rules", "grammar"
        )
    raise too_large()


def _over_tokens(
    next_BQ: np.ndarray,
    accepting_Q: np.ndarray,
    vocabulary: Vocabulary,
    end_ids: Collection[int],
    vocab_size: int,
) -> Automaton:
    texts = list(vocabulary)
    next_CQ, class_T = _over_texts(texts, next_BQ)
    class_V = np.full(vocab_size, -1)
    for text, number in zip(texts, class_T, strict=True):
        class_V[vocabulary[text]] = number
    return _limited(build(next_CQ, accepting_Q, class_V, end_ids))


def _limited(automaton: Automaton) -> Automaton:
    if automaton.set_QD.size > MOST_EDGES:
        raise too_large()
    return automaton


def _over_texts(texts: list[bytes], next_BQ: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the state after each class of texts in each state, or -1, and each text's class.

    Texts form a class if they lead from every state to the same next state. All are read together,
    byte by byte, and those that are equal so far are computed once: few of a vocabulary's differ.
    """
    states = next_BQ.shape[1]
    next_BQ, byte_class = np.unique(next_BQ, axis=0, return_inverse=True)
    next_BQ = np.pad(next_BQ, ((0, 0), (0, 1)), constant_values=-1)  # -1 leads to -1
    marks_Q = np.random.default_rng(0).integers(1, 2**63, states, dtype=np.uint64)
    lengths_T = np.array([len(text) for text in texts])
    spelled = byte_class[np.frombuffer(b"".join(texts), dtype=np.uint8)]
    begins_T = lengths_T.cumsum() - lengths_T
    open_T = np.arange(len(texts))  # texts that lead somewhere and go on
    way_T = np.zeros(len(texts), dtype=np.int64)  # the row of `ways_UQ` that each has reached
    ways_UQ = np.arange(states)[None]
    class_T = np.full(len(texts), -1)
    classes: dict[int, int] = {}
    found: list[np.ndarray] = []
    for at in range(int(lengths_T.max(initial=0))):
        pairs, which = np.unique(
            way_T[open_T] * len(next_BQ) + spelled[begins_T[open_T] + at], return_inverse=True
        )
        way_U, byte_U = np.divmod(pairs, len(next_BQ))
        ways_UQ = next_BQ[byte_U[:, None], ways_UQ[way_U]]
        live_U = np.asarray((ways_UQ >= 0).any(1))
        marks_U = ((ways_UQ + 1).astype(np.uint64) * marks_Q).sum(1)
        marks, first, same_U = np.unique(marks_U, return_index=True, return_inverse=True)
        ways_UQ, way_T[open_T] = ways_UQ[first], same_U[which]
        open_T = open_T[live_U[which]]
        whole_T = open_T[lengths_T[open_T] == at + 1]
        for number in np.unique(way_T[whole_T]):
            if (mark := int(marks[number])) not in classes:
                classes[mark] = len(found)
                found.append(ways_UQ[number])
        named = np.array([classes.get(int(mark), -1) for mark in marks])
        class_T[whole_T] = named[way_T[whole_T]]
        open_T = open_T[lengths_T[open_T] > at + 1]
    return np.array(found, dtype=np.int32).reshape(len(found), states), class_T


def vocabulary_of(tokenizer: "PreTrainedTokenizerBase") -> Vocabulary:
    """Return the ids of each text, as bytes, without special tokens."""
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
    """Return GPT-2's letters for bytes: printable bytes are their own, the others follow 255."""
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
