"""Where the checkout's folders are, from whatever folder a test runs."""

from pathlib import Path

ROOT = Path(__file__).parents[2]
GOLDEN = ROOT / "tests" / "golden"
