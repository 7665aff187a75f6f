"""Tries small faults one by one, and reports which of them the tests notice: `make mutants`."""

import argparse
import importlib
import json
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from tests.mutants.rules import RULES, Rule, complaints, read_rules
from tests.mutants.trials import Trial, copy_tree, run_trials

AT_LEAST = 85
# What most tests import, which takes seconds. Not ray: diffray sets its environment before that.
LIBRARIES = ("torch", "hypothesis", "schemathesis.pytest.plugin", "fastapi", "httpx2")
_SPARE_S, _SPARE = 60.0, 4  # a trial may take this much more, and this many times the time


def main(
    arguments: Sequence[str] | None = None,
    root: Path = RULES.parents[1],
    folder: Path = RULES,
    libraries: Sequence[str] = LIBRARIES,
) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description=__doc__)
    parser.add_argument("pattern", nargs="*", help="rules to try, as ROOM/NAME, such as 'api/*'")
    parser.add_argument("-j", type=int, default=2, help="rules to try at a time (default: 2)")
    parser.add_argument("--at-least", type=int, default=AT_LEAST, help="faults to notice, or fail")
    given = parser.parse_args(arguments)
    begin, rules = time.monotonic(), read_rules(folder)
    if wrong := complaints(rules, root):
        print(*wrong, sep="\n")
        return 1
    names = given.pattern or ["*"]
    rules = [r for r in rules if any(fnmatch(f"{r.room}/{r.name}", name) for name in names)]
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # tests/conftest.py would be too late for torch
    for library in libraries:
        importlib.import_module(library)
    made: list[dict[str, Any]] = []
    seconds: dict[str, float] = {}  # of each test file without a fault
    with tempfile.TemporaryDirectory(prefix="diffray-mutants-") as place:
        # Faults are tried in copies, and undone from another one: the tree may change meanwhile.
        places = (Path(place).resolve() / str(number) for number in range(given.j + 1))
        tree, *copies = (copy_tree(root, each) for each in places)
        alone = [Trial([test]) for test in sorted({test for rule in rules for test in rule.tests})]
        for (tests, *_), failed, took in run_trials(alone, tree, copies):
            seconds[tests[0]] = round(took, 1)
            print(f"{took:6.1f} s  tests/{tests[0]}", flush=True)
            if failed is not None:
                print(f"it fails without a fault: {failed}")
                return 1
        trials = [_trial(rule, seconds) for rule in rules]
        for (_, tried, _), failed, took in run_trials(trials, tree, copies):
            assert tried is not None
            what = "SURVIVED" if failed is None else f"caught by {failed}"
            print(f"{took:6.1f} s  {tried.room}/{tried.name}: {what}", flush=True)
            about = {"room": tried.room, "name": tried.name, "file": tried.file}
            made.append({**about, "caught_by": failed, "seconds": round(took, 1)})
    found = {"seconds": round(time.monotonic() - begin), "mutants": made, "files": seconds}
    (root / "build").mkdir(exist_ok=True)
    (root / "build/mutants.json").write_text(json.dumps(found, indent=1) + "\n")
    print(f"\n{'room':<12}  of caught  ({found['seconds']} s)")
    for room in [*sorted({rule.room for rule in rules}), "all"]:
        own = [each["caught_by"] for each in made if room in (each["room"], "all")]
        print(f"{room:<12}{len(own):4}{sum(by is not None for by in own):7}")
    survivors = [f"{each['room']}/{each['name']}" for each in made if each["caught_by"] is None]
    print("\nsurvivors:", *survivors, sep="\n  ")
    return int(len(made) - len(survivors) < given.at_least)


def _trial(rule: Rule, seconds: dict[str, float]) -> Trial:
    """Return a rule's trial: the quickest file first."""
    tests = sorted(rule.tests, key=lambda test: seconds[test])
    return Trial(tests, rule, _SPARE_S + _SPARE * sum(seconds[test] for test in tests))


if __name__ == "__main__":
    sys.exit(main())
