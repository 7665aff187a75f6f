"""The faults of `make mutants`: they fit today's source, and its runner tells what tests notice."""

import json
import os
import subprocess
import sys
from pathlib import Path

from tests.mutants.rules import RULES, complaints, read_rules

ROOT = RULES.parents[1]
RULE = """
[[mutant]]
name = "{name}"
file = "limits.py"
before = "{before}"
after = "{after}"
tests = ["test_limits.py"]
"""
FAULTS = [
    ("one too many", "count > most", "count >= most"),
    ("another word", "too many", "too much"),
    ("for ever", "        raise", "        while True: pass\\n        raise"),
]
# Without the libraries, and without most plugins of pytest, which this tree does not need.
PLUGINS = {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTEST_PLUGINS": "_hypothesis_pytestplugin"}
RUN = """
import sys
from pathlib import Path
from tests.mutants import __main__ as mutants

mutants._SPARE_S = 1.0
sys.exit(mutants.main(sys.argv[2:], Path(sys.argv[1]), Path(sys.argv[1]), libraries=()))
"""


def made_up(tree: Path, faults: list[tuple[str, str, str]]) -> Path:
    tree.joinpath("tests").mkdir(parents=True)
    tree.joinpath("limits.py").write_text(
        "def check(count: int, most: int) -> None:\n"
        "    if count > most:\n"
        "        raise ValueError(f'too many: {count}')\n"
    )
    tree.joinpath("tests/test_limits.py").write_text(
        "import pytest\nfrom limits import check\n\n"
        "def test_the_most_is_allowed():\n    check(3, 3)\n\n"
        "def test_more_is_refused():\n    with pytest.raises(ValueError):\n        check(4, 3)\n"
    )
    rules = (RULE.format(name=n, before=before, after=after) for n, before, after in faults)
    tree.joinpath("room.toml").write_text("".join(rules))
    subprocess.run(["git", "init", "-q", str(tree)], check=True)
    return tree


def run(tree: Path, *options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", RUN, str(tree), *options]
    env = os.environ | PLUGINS
    return subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)


def test_every_rule_applies_and_names_tests() -> None:
    rules = read_rules()
    assert complaints(rules, ROOT) == []


def test_faults_that_tests_notice_are_told_from_others(tmp_path: Path) -> None:
    tree = made_up(tmp_path, FAULTS)
    done = run(tree, "--at-least", "3")
    assert done.returncode == 1 and done.stdout.endswith("survivors:\n  room/another word\n")
    found = json.loads((tree / "build/mutants.json").read_text())
    assert {each["name"]: each["caught_by"] for each in found["mutants"]} == {
        "one too many": "tests/test_limits.py::test_the_most_is_allowed",
        "another word": None,
        "for ever": "hung",
    }
    assert "count > most" in (tree / "limits.py").read_text(), "only copies change"


def test_failing_tests_and_rules_that_fit_nothing_are_errors(tmp_path: Path) -> None:
    tree = made_up(tmp_path, [*FAULTS, ("one too many", "nowhere", "somewhere")])
    found = complaints(read_rules(tree), tree)
    assert "'one too many' is the name of 2 rules" in found
    assert "'one too many' no longer applies: limits.py has its text 0 times" in found
    tree = made_up(tmp_path / "other", FAULTS)
    with (tree / "tests/test_limits.py").open("a") as file:
        file.write("\ndef test_nothing():\n    assert False\n")
    done = run(tree, "room/one*", "--at-least", "1")
    assert done.returncode == 1
    assert "fails without a fault: tests/test_limits.py::test_nothing" in done.stdout
