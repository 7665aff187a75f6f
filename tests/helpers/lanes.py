"""Which tests a run has, in what order, and how long each may take.

A pytest plugin. Quick tests have no mark; `slow` ones take seconds; `long` ones are left out of
`make test`. Continuous integration takes all but the long ones, then of these `core`, the files
that a change concerns, and one shard of the rest, until a deadline.
"""

import json
import os
import re
import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack
from fnmatch import fnmatch
from pathlib import Path
from typing import Any, Final

import pytest
from xdist.scheduler import LoadFileScheduling

DURATIONS: Final = "tests/durations.json"  # file -> seconds of its short, its long tests
LIMIT_S: Final = {"long": 300, "slow": 300, "quick": 60}
QUICK_CPU_S: Final = 5.0  # a test that needs more must be marked slow (see `slowness`)
COUNT_S: Final = 0.03  # a fast processor's time for a million squares
UNKNOWN_S: Final = 30.0  # for a file whose long tests were never timed
LATE: Final = "not run for time"
# Files that run one after the other, in this order and in one process, since they share something.
TOGETHER: Final = {
    "ray": [
        "tests/control/test_worker_group.py",
        "tests/control/test_llm_ranks.py",
        "tests/control/test_trainer_ranks.py",
        "tests/system/test_request_handles.py",
    ],
    "server": [
        "tests/system/test_ingress.py",
        "tests/system/test_page_served.py",
        "tests/system/test_serve.py",
    ],
}
SHARED: Final = ExitStack()  # ends what they share, after the last of them
# What a test reaches by a command or over HTTP, so that no import tells.
REACHED: Final = {
    "cluster/serve/*": "tests/system/test_*",
    "cluster/control/*": "tests/system/test_[jlnrs]*",
    "cluster/cli/*": "tests/system/test_serve*",
    "cluster/api/page*": "tests/*/test_page*",
    "cluster/api/*": "tests/api/*",
    "kernels/triton/*": "tests/*/test_triton*",
    "examples/train_demo/*": "tests/components/test_demo*",
    "k8s/monitoring/*": "tests/system/test_monitoring.py",
    "pyproject.toml": "tests/system/test_package.py",
    "tests/api/conftest.py": "tests/api/*",
    "tests/helpers/shared.py": "tests/[cs]*/*",  # its fixtures, which no test imports
    "tests/helpers/served.py": "tests/system/test_*",
}
_IMPORT: Final = re.compile(r"^from ((?:diffray|tests|tools|benchmarks)[\w.]*) import", re.M)


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("lanes", "which of the long tests run")
    group.addoption("--shard", metavar="K/N", help="only the long tests of part K of N")
    group.addoption("--core", action="store_true", help="with --shard: also those marked core")
    group.addoption("--since", metavar="REVISION", help="with --shard: also what changed since")
    group.addoption("--turn", type=int, help="run the cases of rotate(n) in turns")
    group.addoption("--deadline", type=float, help="after this Unix time no long file begins")
    group.addoption("--record", action="store_true", help=f"write {DURATIONS}")


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(Lanes(config), "lanes-of-this-run")


def file_of(item: pytest.Item) -> str:
    return item.path.relative_to(item.config.rootpath).as_posix()


def group_of(file: str) -> str:
    return next((group for group, files in TOGETHER.items() if file in files), file)


def lane_of(item: pytest.Item) -> str:
    marks = {mark.name for mark in item.iter_markers()}
    return "long" if "long" in marks else "slow" if "slow" in marks else "quick"


def is_core(item: pytest.Item) -> bool:
    return item.get_closest_marker("core") is not None


def shards(long_s: dict[str, float], count: int) -> list[set[str]]:
    """Deal out files so that each shard takes about the same time."""
    dealt: list[set[str]] = [set() for _ in range(count)]
    total = [0.0] * count
    for file in sorted(long_s, key=lambda file: (-long_s[file], file)):
        least = total.index(min(total))
        dealt[least].add(file)
        total[least] += long_s[file]
    return dealt


def parsed_shard(text: str) -> tuple[int, int]:
    part, _, count = text.partition("/")
    if part.isdigit() and count.isdigit() and 0 < int(part) <= int(count):
        return int(part), int(count)
    raise pytest.UsageError(f"--shard: expected K/N such as 2/4, not {text}")


def changed_since(revision: str, root: Path) -> list[str]:
    command = ["git", "diff", "--name-only", f"{revision}..HEAD"]
    made = subprocess.run(command, cwd=root, capture_output=True, text=True)
    if made.returncode != 0:
        raise pytest.UsageError(f"--since {revision}: {made.stderr.strip()}")
    return made.stdout.split()


def concerns(changed: list[str], file: str, text: str) -> bool:
    """Whether a change concerns a test: itself, what it imports, or what it reaches otherwise."""
    imported = {name.removeprefix("diffray.") for name in _IMPORT.findall(text)}
    return any(
        path == file
        or path.removesuffix(".py").replace("/", ".") in imported
        or any(fnmatch(path, source) and fnmatch(file, REACHED[source]) for source in REACHED)
        for path in changed
    )


def slowness() -> float:
    """Return how many times as long as a fast processor this one takes now, at least 1."""

    def count() -> float:
        begin = time.process_time()
        sum(n * n for n in range(1_000_000))
        return time.process_time() - begin

    return max(1.0, max(count() for _ in range(3)) / COUNT_S)


class LoadGroups(LoadFileScheduling):  # type: ignore[misc]  # xdist has no types
    def _split_scope(self, nodeid: str) -> str:
        return group_of(nodeid.partition("::")[0])


class Lanes:
    """The state of one run, in the process that runs tests and in the one that reports."""

    def __init__(self, config: pytest.Config) -> None:
        self.config = config
        self.root = config.rootpath
        self.durations: dict[str, list[float]] = {}
        if (recorded := self.root / DURATIONS).exists():
            self.durations = json.loads(recorded.read_text())
        shard, since = config.getoption("--shard"), config.getoption("--since")
        self.shard = parsed_shard(shard) if shard else None
        self.changed = changed_since(since, self.root) if since else []
        self.concerned: set[str] = set()
        self.begun: set[str] = set()
        self.seen: dict[str, list[float]] = {}

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        for item in items:
            if item.get_closest_marker("timeout") is None:
                item.add_marker(pytest.mark.timeout(LIMIT_S[lane_of(item)]))
        if self.shard is not None:
            self.take_shard(items, *self.shard)
        if (turn := self.config.getoption("--turn")) is not None:
            self.rotate(items, turn)
        self.sort(items)

    def keep(self, items: list[pytest.Item], kept: set[pytest.Item]) -> None:
        self.config.hook.pytest_deselected(items=[item for item in items if item not in kept])
        items[:] = [item for item in items if item in kept]

    def take_shard(self, items: list[pytest.Item], part: int, count: int) -> None:
        files = {file_of(item) for item in items if lane_of(item) == "long"}
        long_s = {file: self.durations.get(file, [0.0, 0.0])[1] or UNKNOWN_S for file in files}
        self.concerned = {
            file for file in files if concerns(self.changed, file, (self.root / file).read_text())
        }
        taken = self.concerned | shards(long_s, count)[part - 1]
        core = self.config.getoption("--core")
        kept = {
            item
            for item in items
            if lane_of(item) != "long" or file_of(item) in taken or (core and is_core(item))
        }
        self.keep(items, kept)

    def rotate(self, items: list[pytest.Item], turn: int) -> None:
        """Leave out cases that take turns, of each function all but a few; core ones stay."""
        cases: dict[str, list[pytest.Item]] = {}
        for item in items:
            if item.get_closest_marker("rotate") and not is_core(item):
                cases.setdefault(item.nodeid.partition("[")[0], []).append(item)
        left = set()
        for each in cases.values():
            mark = each[0].get_closest_marker("rotate")
            assert mark is not None
            chosen = {(turn * mark.args[0] + at) % len(each) for at in range(mark.args[0])}
            left |= {item for at, item in enumerate(each) if at not in chosen}
        self.keep(items, set(items) - left)

    def sort(self, items: list[pytest.Item]) -> None:
        """Put files that mostly wait first, then the quick ones, then those only of long tests.

        Of each kind the longest come first, so that two processes end at about the same time. A
        group of files counts as one.
        """
        rank: dict[str, int] = {}
        seconds: dict[str, dict[str, float]] = {}
        for item in items:
            file, lane = file_of(item), lane_of(item)
            group = group_of(file)
            seconds.setdefault(group, {})[file] = sum(self.durations.get(file, [0.0]))
            if lane != "long":
                kind = 0 if lane == "slow" else 1
            elif is_core(item):
                kind = 2
            else:
                kind = 3 if file in self.concerned else 4
            rank[group] = min(rank.get(group, kind), kind)

        def place(item: pytest.Item) -> tuple[int, float, str, int]:
            group = group_of(file := file_of(item))
            at = TOGETHER.get(group, [file]).index(file)
            return rank[group], -sum(seconds[group].values()), group, at

        items.sort(key=place)

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        file, deadline = file_of(item), self.config.getoption("--deadline")
        if self.config.getoption("--again", False):
            deadline = None  # a test that failed is not excused for want of time
        if lane_of(item) != "long" or is_core(item):
            return
        if deadline is not None and file not in self.begun and time.time() > deadline:
            pytest.skip(LATE)
        self.begun.add(file)

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_make_scheduler(self, config: pytest.Config, log: Any) -> LoadGroups | None:
        return LoadGroups(config, log) if config.getoption("dist") == "loadfile" else None

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_teardown(
        self, item: pytest.Item, nextitem: pytest.Item | None
    ) -> Iterator[None]:
        try:
            yield
        finally:
            if not nextitem or group_of(file_of(nextitem)) != group_of(file_of(item)):
                SHARED.close()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self, item: pytest.Item) -> Iterator[None]:
        begin = sum(os.times()[:4])
        yield
        used = sum(os.times()[:4]) - begin
        if used > QUICK_CPU_S and lane_of(item) == "quick":
            limit = QUICK_CPU_S * slowness()
            if used > limit:
                said = f"took {used:.1f} s of processor time, over {limit:.1f} s: mark it slow"
                pytest.fail(said, pytrace=False)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        file = report.nodeid.partition("::")[0]
        seen = self.seen.setdefault(file, [0.0, 0.0])
        seen["long" in report.keywords] += report.duration

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self) -> None:
        SHARED.close()
        if self.config.getoption("--record") and not hasattr(self.config, "workerinput"):
            self.record()

    def record(self) -> None:
        known = {file: s for file, s in self.durations.items() if (self.root / file).exists()}
        for file, (short, long) in self.seen.items():
            before = known.get(file, [0.0, 0.0])
            known[file] = [round(short or before[0], 1), round(long or before[1], 1)]
        lines = (f"{json.dumps(file)}: {json.dumps(s)}" for file, s in sorted(known.items()))
        (self.root / DURATIONS).write_text("{\n" + ",\n".join(lines) + "\n}\n")

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        late = [r for r in terminalreporter.stats.get("skipped", []) if LATE in str(r.longrepr)]
        if late:
            terminalreporter.write_line(f"{LATE}: {len(late)}")
