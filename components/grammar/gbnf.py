"""Reads a context-free grammar in GBNF, the notation of llama.cpp, which vLLM's users write too."""

import re
from collections.abc import Mapping
from typing import Final, NamedTuple

from diffray.components.config import InvalidField
from diffray.components.grammar.json_strings import in_set

_LONGEST: Final = 2**16  # characters of a grammar
_MOST_TIMES: Final = 1000


class Text(NamedTuple):
    """A literal text."""

    spelled: bytes


class Regex(NamedTuple):
    """The texts of a regular expression."""

    regex: str


class Ref(NamedTuple):
    """The texts of a rule."""

    rule: str


class Row(NamedTuple):
    """Parts one after the other."""

    parts: "tuple[Node, ...]"


class Either(NamedTuple):
    """One of several options."""

    options: "tuple[Node, ...]"


class Repeat(NamedTuple):
    """A repeated part; without `most`, any number of times."""

    part: "Node"
    least: int
    most: int | None


Node = Text | Regex | Ref | Row | Either | Repeat
Rules = Mapping[str, Node]  # from `root` on

_TOKEN: Final = re.compile(
    r"""
    (?P<skip> \s+ | \#[^\n]* )
  | (?P<rule> [A-Za-z][\w-]*(?=\s*::=) ) \s* ::=
  | (?P<name> [A-Za-z][\w-]* )
  | " (?P<text> (?:[^"\\\n]|\\.)* ) "
  | \[ (?P<set> (?:[^\]\\\n]|\\.)+ ) \]
  | (?P<times> [*+?] | \{\s*\d+\s*(?:,\s*\d*\s*)?\} )
  | (?P<sign> [()|.] )
    """,
    re.VERBOSE,
)
_LETTER: Final = r"\\(?:x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|.)|[^\\]"
_RANGE: Final = re.compile(f"({_LETTER})(?:-({_LETTER}))?", re.DOTALL)
_ESCAPED: Final = {"n": "\n", "t": "\t", "r": "\r"}
_TIMES: Final[Mapping[str, tuple[int, int | None]]] = {"*": (0, None), "+": (1, None), "?": (0, 1)}


class _Token(NamedTuple):
    kind: str  # of a sign: the sign
    text: str
    line: int

    def wrong(self, why: str) -> InvalidField:
        return InvalidField(f"grammar, line {self.line}: {self.text[:30]!r} {why}", "grammar")


def read_grammar(text: str) -> Rules:
    """Return the rules by their names; raises InvalidField with the line that is wrong."""
    if len(text) > _LONGEST:
        raise InvalidField(
            f"grammar: it has {len(text)} characters, and {_LONGEST} are the most", "grammar"
        )
    reader = _Reader(text)
    try:
        rules = reader.rules()
    except RecursionError:
        raise InvalidField("grammar: too many nested parentheses", "grammar") from None
    for token in (_Token("name", "root", 1), *reader.named):
        if token.text not in rules:
            raise token.wrong("is not a rule of the grammar; rules are written name ::= ...")
    return rules


class _Reader:
    """Reads rules part by part; a line may break anywhere."""

    def __init__(self, text: str) -> None:
        self.named: list[_Token] = []  # rules that others use
        self._tokens: list[_Token] = []  # the next one last
        at, line = 0, 1
        while at < len(text):
            found = _TOKEN.match(text, at)
            if found is None:
                raise _Token("", text[at:].split()[0], line).wrong("is not GBNF")
            kind = str(found.lastgroup)
            if kind != "skip":
                self._tokens.append(_Token(found["sign"] or kind, found[kind], line))
            line, at = line + found[0].count("\n"), found.end()
        self._tokens = [_Token("end", "the end", line), *reversed(self._tokens)]

    def rules(self) -> dict[str, Node]:
        found: dict[str, Node] = {}
        while (token := self._tokens.pop()).kind == "rule":
            if token.text in found:
                raise token.wrong("is defined twice")
            found[token.text] = self._either()
        if token.kind != "end":
            raise token.wrong("is unexpected")
        return found

    def _either(self) -> Node:
        options = [self._row()]
        while self._tokens[-1].kind == "|":
            self._tokens.pop()
            options.append(self._row())
        return Either(tuple(options))

    def _row(self) -> Row:
        parts: list[Node] = []
        while self._tokens[-1].kind in ("name", "text", "set", ".", "("):
            part = self._part(self._tokens.pop())
            while self._tokens[-1].kind == "times":
                part = Repeat(part, *_times(self._tokens.pop()))
            parts.append(part)
        return Row(tuple(parts))

    def _part(self, token: _Token) -> Node:
        match token.kind:
            case "name":
                self.named.append(token)
                return Ref(token.text)
            case "text":
                letters = re.findall(_LETTER, token.text)
                return Text("".join(_unescaped(each, token) for each in letters).encode())
            case "set":
                return _set(token)
            case ".":
                return Regex("(?s:.)")
        inner = self._either()
        if (closing := self._tokens.pop()).kind != ")":
            raise closing.wrong("is unexpected")
        return inner


def _times(token: _Token) -> tuple[int, int | None]:
    if token.text in _TIMES:
        return _TIMES[token.text]
    least, *upto = map(int, re.findall(r"\d+", token.text))
    most = None if "," in token.text and not upto else max([least, *upto])
    if max(least, most or 0) > _MOST_TIMES or (upto and upto[0] < least):
        raise token.wrong(f"is not a valid repetition; the most is {_MOST_TIMES}")
    return least, most


def _set(token: _Token) -> Regex:
    negated = token.text.startswith("^")
    written = ""
    for first, last in _RANGE.findall(token.text[negated:]):
        low, high = _unescaped(first, token), _unescaped(last or first, token)
        if high < low:
            raise token.wrong(f"has no characters from {first} to {last}")
        written += f"{in_set(ord(low))}-{in_set(ord(high))}"
    if not written:
        raise token.wrong("excludes nothing")
    return Regex(f"[{'^' * negated}{written}]")


def _unescaped(letter: str, token: _Token) -> str:
    if not letter.startswith("\\"):
        return letter
    kind, code = letter[1], letter[2:]
    if code and not 0xD800 <= int(code, 16) < 0xE000:
        return chr(int(code, 16))
    if code or (kind.isalnum() and kind not in _ESCAPED):
        raise token.wrong(f"has {letter}, which is not a character")
    return _ESCAPED.get(kind, kind)
