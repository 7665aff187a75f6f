"""Folders that benchmarks and tests read."""

from pathlib import Path

GOLDEN = Path(__file__).parents[1] / "tests" / "golden"
