"""Reads YAML files that people write, with one sentence for each mistake."""

from collections.abc import Hashable
from pathlib import Path
from typing import Any

import yaml


def read_yaml(path: Path) -> object:
    """Return the values of a file; raise ValueError if it cannot be read, or is no YAML."""
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ValueError(f"{path}: there is no such file") from None
    except OSError as error:
        raise ValueError(f"{path}: the file cannot be read ({error.strerror})") from None
    except UnicodeDecodeError:
        raise ValueError(f"{path}: the file is not UTF-8 text") from None
    return parse_yaml(text, str(path))


class _Loader(yaml.SafeLoader):
    """PyYAML's safe loader lets the last of two equal keys win; this one refuses the second."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        seen: set[str] = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode) and key.tag != "tag:yaml.org,2002:merge":
                if key.value in seen:
                    raise yaml.MarkedYAMLError(
                        problem=f"the key {key.value!r} is given twice", problem_mark=key.start_mark
                    )
                seen.add(key.value)
        return super().construct_mapping(node, deep)


def parse_yaml(text: str, where: str) -> object:
    """Return the values of a YAML text; raise ValueError with the place of an error."""
    try:
        return yaml.load(text, _Loader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = f"line {mark.line + 1}, column {mark.column + 1}: " if mark else ""
        raise ValueError(f"{where}: {line}{error.problem}") from None
    except (yaml.YAMLError, ValueError, RecursionError) as error:  # a date such as 2024-13-45
        raise ValueError(f"{where}: {' '.join(str(error).split())}") from None
