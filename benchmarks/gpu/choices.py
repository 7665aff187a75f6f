"""The outcomes of bring-up for the models of one run: `bring_up` writes them, all programs read.

Imports no pydantic, so that programs with torch and Triton alone can use it.
"""

import json
from collections.abc import Iterator
from collections.abc import Sequence as Items
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from diffray.kernels.trial import SELECTIONS, Outcome, Selection, choices_of
from diffray.kernels.variants import TORCH_VARIANT, UNTRIED, Choices, Shape, Variant

CHOSEN, DEFAULT = "chosen", "default"


def write(
    folder: Path, shape: str, weights: str, outcomes: Items[Outcome], selection: Selection
) -> None:
    """Write the outcomes for a model with this kind of weights, after those of other sizes."""
    folder.mkdir(parents=True, exist_ok=True)
    selections, before = _read(folder, shape, weights)
    selection = max((selection, *selections), key=SELECTIONS.index)
    found = {"selection": selection, "outcomes": [asdict(each) for each in (*before, *outcomes)]}
    (folder / f"{shape} {weights}.json").write_text(json.dumps(found))


def kinds(folder: Path | None, shape: str, weights: str = "*") -> list[str]:
    """Return which variants a program measures: those that bring-up chose, if any, and defaults."""
    return [CHOSEN, DEFAULT] if any(_files(folder, shape, weights)) else [DEFAULT]


def choices_for(kind: str, folder: Path | None, shape: str, weights: str = "*") -> Choices:
    """Return the choices of a kind, for all kinds of weights together if none is named."""
    if kind == DEFAULT:
        return UNTRIED
    selections, outcomes = _read(folder, shape, weights)
    return choices_of(outcomes, max(selections, key=SELECTIONS.index))


def right_variants(folder: Path | None, shape: str) -> list[str]:
    """Return "kernel variant" of all that bring-up found right for a model, except torch's."""
    _, outcomes = _read(folder, shape, "*")
    right = choices_of(outcomes).right
    return sorted(f"{kernel} {variant}" for kernel, variant in right if variant != TORCH_VARIANT)


def _files(folder: Path | None, shape: str, weights: str) -> Iterator[Path]:
    return iter(()) if folder is None else folder.glob(f"{shape} {weights}.json")


def _read(folder: Path | None, shape: str, weights: str) -> tuple[list[Selection], list[Outcome]]:
    selections, outcomes = list[Selection](), list[Outcome]()
    for file in sorted(_files(folder, shape, weights)):
        found: dict[str, Any] = json.loads(file.read_text())
        selections.append(found["selection"])
        for each in found["outcomes"]:
            facts, sizes = map(tuple, each["shape"])
            outcomes.append(Outcome(**each | {"shape": Shape(facts, sizes)}))
    return selections, outcomes


class NotOfferedError(Exception):
    """A call does not offer the requested variant."""


@dataclass(frozen=True, slots=True)
class Only(Choices):
    """Chooses one variant of one kernel, and torch's for all others."""

    kernel: str = ""
    variant: str = ""

    def pick(self, kernel: str, shape: Shape, variants: Items[Variant]) -> Variant:
        if kernel != self.kernel:
            return variants[-1]
        for each in variants:
            if each.name == self.variant:
                return each
        raise NotOfferedError(f"{kernel} has no {self.variant!r} at {shape.sizes}")
