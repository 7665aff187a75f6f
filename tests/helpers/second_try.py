"""What a second try is worth: a test that passes only then has to be known as flaky.

A pytest plugin. `make` runs the tests that failed once more, alone, with --again.
"""

from collections.abc import Iterator
from typing import Final

import pytest

FLAKY: Final = "tests/flaky.txt"
MOST: Final = 3


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--again",
        action="store_true",
        help=f"the run is a second try: fail if a test passes that is not in {FLAKY}",
    )


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--again"):
        config.pluginmanager.register(SecondTry(config), "second-try-of-this-run")


def known(text: str) -> set[str]:
    """Return the tests of lines such as `2026-11-27 tests/test_a.py::test_b -- why`."""
    return {
        line.partition(" -- ")[0].partition(" ")[2]
        for line in text.splitlines()
        if line[:1].isdigit()
    }


class SecondTry:
    def __init__(self, config: pytest.Config) -> None:
        self.flaky = known((config.rootpath / FLAKY).read_text())
        self.passed: list[str] = []

    def unknown(self) -> list[str]:
        return [test for test in self.passed if test not in self.flaky]

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        if len(session.items) > MOST:
            pytest.exit(f"{len(session.items)} tests failed; {MOST} at most are tried again", 1)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" and report.passed:
            self.passed.append(report.nodeid)

    @pytest.hookimpl(wrapper=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> Iterator[None]:
        if self.unknown() and session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED
        yield

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        for test in self.unknown():
            terminalreporter.write_line(
                f"{test} failed, then passed: mend it, or say in {FLAKY} since when and why"
            )
