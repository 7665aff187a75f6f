"""The rules: small faults in the product, and the tests that should notice each."""

import tomllib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

RULES = Path(__file__).parent  # with a TOML file for each room


@dataclass(frozen=True, slots=True)
class Rule:
    """One fault: in `file`, `before` becomes `after`; `tests` are files, or tests, below tests/."""

    room: str
    name: str
    file: str
    before: str
    after: str
    tests: list[str]

    def apply(self, root: Path) -> None:
        path = root / self.file
        path.write_text(path.read_text().replace(self.before, self.after))


def read_rules(folder: Path = RULES) -> list[Rule]:
    files = sorted(folder.glob("*.toml"))
    return [
        Rule(path.stem, **given)
        for path in files
        for given in tomllib.loads(path.read_text())["mutant"]
    ]


def complaints(rules: Sequence[Rule], root: Path) -> list[str]:
    """Return what keeps rules from being tried on the tree at `root`."""
    names = Counter(rule.name for rule in rules)
    found = [f"{name!r} is the name of {count} rules" for name, count in names.items() if count > 1]
    for rule in rules:
        path = root / rule.file
        count = path.read_text().count(rule.before) if path.is_file() else 0
        if count != 1 or rule.before == rule.after:
            found.append(f"{rule.name!r} no longer applies: {rule.file} has its text {count} times")
        for test in rule.tests:
            if not (root / "tests" / test.partition("::")[0]).is_file():
                found.append(f"{rule.name!r} names tests/{test}, which is not there")
    return found
