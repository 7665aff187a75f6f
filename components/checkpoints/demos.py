"""The bundled checkpoints: small models trained by the project."""

import re
from importlib.resources import files
from pathlib import Path

DEMOS = {"demo": "llada_moe", "demo-llada2": "llada2_moe"}  # name -> folder in the package
TOY = (
    "is a toy that gets most of its few tasks right: arithmetic up to 100, word problems, short "
    "Python functions, facts of a sentence as JSON, sorting numbers, reversing a list, spelling a "
    "word, and calling a function whose arguments stand in the question; asked for anything else, "
    "it says that it cannot"
)
HUB_ID = re.compile(r"([\w-][\w.-]*/)?[\w-][\w.-]*")
EXAMPLE = (
    "Max reads 8 pages per day for 5 days. Then he reads 10 pages per day for 2 days. "
    "How many pages does he read in total?"
)
FUNCTION = (
    "Write a Python function that returns the sum of the squares of the even numbers in a list."
)
FACTS = "Give job and age as JSON: Anna, 31, is a nurse from Rome."


def examples(source: str) -> tuple[str, ...]:
    """Return prompts to try: what a demo model knows, or one for any other model."""
    return (FUNCTION, EXAMPLE, FACTS) if source in DEMOS else (FUNCTION,)


def description(source: str, name: str) -> str:
    """Return what a demo model, served under a name, is and knows; empty for any other model."""
    return f"{name} {TOY}." if source in DEMOS else ""


def demo_path(name: str) -> Path | None:
    """Return the folder of a demo model; None if `name` is not a demo."""
    if name not in DEMOS:
        return None
    folder = Path(str(files("diffray"))) / "demo" / DEMOS[name]
    if not folder.is_dir():
        raise ValueError(f"this installation lacks the model {name!r} ({folder} is missing)")
    return folder
