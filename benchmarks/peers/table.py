"""Systems take turns at the same work and get a row each; and a peer's own environment."""

import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks import paired

OURS = "diffray"
# LLaDA's modelling code was written for transformers 4, and an early one imports einops.
OF_THE_CODE = "transformers>=4.46,<5", "einops"
# The versions are those of docs/benchmarks.md.
REQUIREMENTS = {
    "dlmserve": ("dlmserve==0.1.1", *OF_THE_CODE),
    "dfastllm": ("dfastllm==0.0.4", *OF_THE_CODE),
    "diffusers": ("diffusers==0.39.0", "accelerate", *OF_THE_CODE),
}


class System(NamedTuple):
    """A contender; `same`: whether its algorithm is the first system's."""

    name: str
    take: Callable[[int], paired.Turn]
    same: bool = True


def compare(
    work: str, systems: list[System], turns: int, right: Callable[[Any], str] | None = None
) -> None:
    """Let the systems take turns and print the table; `right` judges answers instead of tokens."""
    found = paired.take_turns(
        {each.name: each.take for each in systems},
        turns,
        describe=lambda turn: f"{turn.rate:.1f} tokens/s",
    )
    print("\n".join([f"\n{work}:\n", *table(systems, found, right)]), flush=True)


def table(
    systems: list[System],
    found: Mapping[str, Sequence[paired.Turn]],
    right: Callable[[Any], str] | None = None,
) -> list[str]:
    """Return the head and a row for each system, compared with each of diffray's."""
    bases = [name for name in found if name.startswith(OURS)]
    ratios = [f"{name} / it" for name in bases]
    last = "right" if right else "equal tokens"
    rows = [paired.head("system", "tokens/s", *ratios, "tokens a forward", last)]
    for name, _, same in systems:
        turns, final = found[name], found[name][-1]
        cells = ["1" if base == name else paired.speedup(found[base], turns) for base in bases]
        cells.append(f"{final.tokens / sum(final.forwards):.2f}" if final.forwards else "")
        if right:
            cells.append(right(final.rows))
        else:
            first = found[systems[0].name]
            cells.append(paired.equal_tokens(first, turns) if same else "another algorithm")
        rows.append(paired.row(name, paired.rate(turns), *cells))
    return rows


def environment(folder: Path, name: str) -> Path:
    """Return the Python of a peer's environment, which is made if it is missing or outdated."""
    folder = folder.resolve() / name
    python, receipt = folder / "bin" / "python", folder / "requirements.txt"
    # torch is first, so that nothing else picks its build.
    wanted = f"torch=={version('torch').partition('+')[0]}", *REQUIREMENTS[name]
    if receipt.is_file() and receipt.read_text() == "\n".join(wanted):
        return python
    print(f"making {folder} for {' '.join(wanted)}", file=sys.stderr)
    install = [str(python), "-m", "pip", "install", "--quiet"]
    venv = [sys.executable, "-m", "venv", str(folder)]
    for command in (venv, [*install, wanted[0]], [*install, *wanted[1:]]):
        if status := subprocess.run(command).returncode:
            raise ValueError(f"{name} is not installed: {' '.join(command)} ended with {status}")
    receipt.write_text("\n".join(wanted))
    return python


def variables(threads: int) -> dict[str, str]:
    """Return a peer's environment; without TORCHDYNAMO_DISABLE every length would be compiled."""
    return {
        "OMP_NUM_THREADS": str(threads),
        "TORCHDYNAMO_DISABLE": "1",
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }
