"""What some tests need and `make` does not install: chromium, npm, node, curl, and `clients`.

A test is skipped where it is missing, and fails if the variable TESTS_REQUIRE names it.
"""

import os
import shutil
import subprocess
from pathlib import Path
from typing import Final, NoReturn

import pytest

REQUIRED: Final = "TESTS_REQUIRE"  # names, separated by spaces
_NAMES: Final = {"chromium": ("chromium", "chromium-browser", "google-chrome")}


def needed(program: str) -> str:
    """Return the path of a program; where there is none, the test ends here."""
    for name in _NAMES.get(program, (program,)):
        if found := shutil.which(name):
            return found
    lacking(program, "which is not installed")


def lacking(program: str, why: str) -> NoReturn:
    """Skip the test, or fail it if it must have what it needs."""
    if program in os.environ.get(REQUIRED, "").split():
        pytest.fail(f"needs {program}, {why}, and {REQUIRED} names it")
    pytest.skip(f"needs {program}, {why}")


def npm(folder: Path, *arguments: str) -> None:
    """Run npm in a folder; the test ends here where npm is missing or cannot reach its registry."""
    command = [needed("npm"), *arguments, "--silent"]
    try:
        made = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=120)
    except subprocess.TimeoutExpired:
        lacking("npm", f"and {arguments[0]} did not end within 120 s")
    if made.returncode != 0:
        lacking("npm", f"and {arguments[0]} failed: {made.stderr.strip()[-200:]}")
