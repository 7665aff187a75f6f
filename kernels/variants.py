"""The variants of each kernel, and which of them runs.

A variant is a program with the tile that it runs with. All variants of a kernel compute what its
torch reference does. Which of them are right and which is the fastest depends on the GPU and on the
shape of the call; bring-up finds out (workers/bring_up/), and `Choices` holds the outcome.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from collections.abc import Sequence as Items
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from diffray.kernels.numeric_errors import largest_error

TORCH_VARIANT = "torch"  # the name of the reference as a variant

Run = Callable[..., Any]


class Tile(NamedTuple):
    """How a program tiles its matrices and is launched."""

    rows: int
    columns: int
    depth: int
    warps: int
    stages: int

    def __str__(self) -> str:
        return f"{self.rows}x{self.columns}x{self.depth} w{self.warps} s{self.stages}"


class Variant(NamedTuple):
    """One way to compute a kernel."""

    name: str  # unique in its kernel; stored on disk
    run: Run  # takes the arguments of the reference
    tolerance: float = 1.0  # the largest error, in multiples of what the dtype allows
    # What it may save in a step beyond its own time, because it starts, or fetches weights, while
    # the kernels before it run.
    early_s: float = 0.0


def tiled(program: str, tile: Tile, run: Run, early_s: float = 0.0) -> Variant:
    """Return the variant that runs a program with this tile."""
    return Variant(f"{program} {tile}", partial(run, tile=tile), early_s=early_s)


class Shape(NamedTuple):
    """What the fastest variant of a call depends on."""

    facts: tuple[int | str, ...]  # a choice serves only equal ones
    sizes: tuple[int, ...]  # rounded up to powers of two; a choice also serves near ones

    def distance(self, other: "Shape") -> float:
        """Return how many doublings lie between the sizes; infinite if the facts differ."""
        if self.facts != other.facts:
            return math.inf
        return sum(abs(math.log2(a / b)) for a, b in zip(self.sizes, other.sizes, strict=True))


def _nothing(*_: Any, **__: Any) -> tuple[Tensor, ...]:
    return ()


def _of_first(first: Tensor, *_: Any, **__: Any) -> torch.dtype:
    return first.dtype


def _always(*_: Any, **__: Any) -> bool:
    return True


@dataclass(frozen=True, slots=True)
class Kernel:
    """A kernel with several variants; all functions here take the arguments of the reference."""

    name: str  # its field in `Kernels`
    reference: Run
    shape: Callable[..., Shape]
    own_variants: Callable[..., Items[Variant]]  # the default first; equal for equal shapes
    written: Callable[..., Items[Tensor]] = _nothing  # arguments that it stores to
    # The error of outputs and stored tensors, given the arguments and the reference's tensors.
    error: Callable[[Items[Any], Items[Tensor], Items[Tensor]], float] = largest_error
    tolerance: float = 1.0  # a multiple of the dtype's, depending on what the kernel rounds
    precision: Callable[..., torch.dtype] = _of_first  # the dtype whose tolerance applies
    # Whether the reference can be recorded, that is, never waits for a value on the host.
    recordable: Callable[..., bool] = _always

    def variants(self, *args: Any, **options: Any) -> list[Variant]:
        """Return the variants for these arguments: the default first, torch's last."""
        return [*self.own_variants(*args, **options), Variant(TORCH_VARIANT, self.reference)]


@dataclass(frozen=True, slots=True)
class Choices:
    """The chosen variant of each kernel and shape; variants not found right do not run."""

    chosen: Mapping[tuple[str, Shape], str]
    right: frozenset[tuple[str, str]] = frozenset()  # (kernel, variant): right wherever tried
    tried: frozenset[str] = frozenset()  # kernels

    def pick(self, kernel: str, shape: Shape, variants: Items[Variant]) -> Variant:
        """Return the choice for the nearest known shape.

        Without one, return a variant that is right elsewhere, else torch's. A kernel that was never
        tried runs its default.
        """
        named = {variant.name: variant for variant in variants}
        for name in self._nearest(kernel, shape):
            if name in named:
                return named[name]
        if kernel not in self.tried:
            return variants[0]
        right = (each for each in variants if (kernel, each.name) in self.right)
        return next(right, named[TORCH_VARIANT])

    def _nearest(self, kernel: str, shape: Shape) -> Iterator[str]:
        known = [
            (shape.distance(other), other, name)
            for (owner, other), name in self.chosen.items()
            if owner == kernel
        ]
        yield from (name for distance, _, name in sorted(known) if distance < math.inf)


UNTRIED = Choices({})


def chosen(kernel: Kernel, choices: Choices) -> Run:
    """Return the kernel as one function, which runs the variant that is chosen for each call."""
    picked: dict[Shape, Variant] = {}

    def run(*args: Any, **options: Any) -> Any:
        shape = kernel.shape(*args, **options)
        variant = picked.get(shape)
        if variant is None:
            variants = kernel.variants(*args, **options)
            variant = picked[shape] = choices.pick(kernel.name, shape, variants)
        return variant.run(*args, **options)

    return run


def rounded_up(count: int) -> int:
    """Return the smallest power of two that is not less."""
    return 1 << max(count - 1, 0).bit_length()
