"""YAML for configurations: no duplicate keys, bounded size after expanding aliases."""

from collections.abc import Hashable
from typing import Any, Final

import yaml

MERGE: Final = "tag:yaml.org,2002:merge"  # the tag of <<
MOST_CHARACTERS: Final = 2**20
_MOST_VALUES: Final = 10_000  # with aliases expanded
_INT64: Final = 2**63


def parse_yaml(text: str, where: str) -> object:
    """Return the values of a YAML text, or raise with the place of the first mistake."""
    if len(text) > MOST_CHARACTERS:
        raise ValueError(f"{where}: more than {MOST_CHARACTERS} characters are no configuration")
    try:
        loader = _Loader(text)
        try:
            node = loader.get_single_node()
            if node is None:
                return None
            _Sizes().of(node)
            return loader.construct_document(node)
        finally:
            loader.dispose()
    except yaml.YAMLError as error:
        raise ValueError(f"{where}: {_sentence(error)}") from None
    except RecursionError:
        raise ValueError(f"{where}: values are nested too deep") from None


class _Loader(yaml.SafeLoader):
    """PyYAML's safe loader, without its rule that the last of two equal keys wins."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[Hashable] = set()
        for key_node, _ in node.value:
            key = None if key_node.tag == MERGE else self.construct_object(key_node, deep=True)
            if key is None or not isinstance(key, Hashable):
                continue
            if key in seen:
                raise yaml.MarkedYAMLError(
                    problem=f"the key {key!r} stands twice", problem_mark=key_node.start_mark
                )
            seen.add(key)
        return super().construct_mapping(node, deep)

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        """Add the place to errors about values that look like numbers or dates."""
        try:
            value = super().construct_object(node, deep)
        except (ValueError, OverflowError) as error:
            raise _refusal(f"{_quoted(node)} cannot be read ({error})", node) from None
        if isinstance(value, int) and not -_INT64 <= value < _INT64:
            raise _refusal(f"{_quoted(node)} is a whole number beyond 64 bits", node)
        return value


class _Sizes:
    """Counts values before they are built: nested aliases can expand to billions."""

    def __init__(self) -> None:
        self._known: dict[int, int] = {}
        self._open: set[int] = set()

    def of(self, node: yaml.Node) -> int:
        """Return the number of values in a node; refuse too many, and recursive nodes."""
        mark = id(node)
        if mark in self._known:
            return self._known[mark]
        if mark in self._open:
            raise _refusal("the alias stands within what it stands for", node)
        self._open.add(mark)
        size = 1
        if isinstance(node, yaml.SequenceNode):
            size += sum(map(self.of, node.value))
        elif isinstance(node, yaml.MappingNode):
            size += sum(self.of(key) + self.of(value) for key, value in node.value)
        if size > _MOST_VALUES:
            raise _refusal(f"more than {_MOST_VALUES} values are no configuration", node)
        self._open.remove(mark)
        self._known[mark] = size
        return size


def _refusal(problem: str, node: yaml.Node) -> yaml.MarkedYAMLError:
    return yaml.MarkedYAMLError(problem=problem, problem_mark=node.start_mark)


def _quoted(node: yaml.Node) -> str:
    text = ascii(node.value)
    return text if len(text) <= 60 else f"{text[:60]}..."


def _sentence(error: yaml.YAMLError) -> str:
    if isinstance(error, yaml.MarkedYAMLError) and error.problem_mark is not None:
        mark = error.problem_mark
        return f"line {mark.line + 1}, column {mark.column + 1}: {error.problem}"
    return " ".join(str(error).split())
