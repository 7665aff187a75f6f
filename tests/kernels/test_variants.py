"""Which variant of a kernel runs: the choice for the nearest shape, never one that was refused."""

from typing import Any

import pytest

from diffray.kernels.choose import TORCH, with_variants
from diffray.kernels.variants import (
    UNTRIED,
    Choices,
    Kernel,
    Shape,
    Tile,
    Variant,
    rounded_up,
    tiled,
)

NAMES = "default", "wide", "narrow"


def shape(size: int, dtype: str = "float32") -> Shape:
    return Shape((64, dtype), (rounded_up(size),))


KERNEL = Kernel(
    "rms_norm",
    lambda size, dtype="float32": ("torch", size),
    shape,
    lambda *_, **__: [Variant(name, lambda size, name=name, **_: (name, size)) for name in NAMES],
)


def known(**chosen: int) -> Choices:
    """Each of these variants was chosen for a size."""
    return Choices({("rms_norm", shape(size)): name for name, size in chosen.items()})


def verified(*names: str) -> Choices:
    """The kernel was tried, at another shape, and these variants were right."""
    return Choices({}, frozenset(("rms_norm", n) for n in names), frozenset({"rms_norm"}))


OTHERS = Choices({("rms_norm", shape(16)): "wide", ("add_norm", shape(16, "float16")): "wide"})


@pytest.mark.parametrize(
    ("choices", "size", "dtype", "runs"),
    [
        # The nearest known size decides.
        *((known(wide=16, narrow=1024), size, "float32", "wide") for size in (1, 16, 60, 128)),
        *((known(wide=16, narrow=1024), size, "float32", "narrow") for size in (129, 5000)),
        (known(gone=16, narrow=64), 16, "float32", "narrow"),
        (known(torch=16), 16, "float32", "torch"),
        # Other facts and other kernels decide nothing; untried, the default runs.
        (OTHERS, 16, "float16", "default"),
        (UNTRIED, 16, "float32", "default"),
        (Choices({}, tried=frozenset({"add_norm"})), 16, "float32", "default"),
        # Where no choice fits, only what is right elsewhere runs.
        (verified("wide", "narrow"), 16, "float32", "wide"),
        (verified(), 16, "float32", "torch"),
    ],
)
def test_the_choice_for_the_nearest_shape_runs(
    choices: Choices, size: int, dtype: str, runs: str
) -> None:
    kernels: Any = with_variants("triton", [KERNEL], choices)
    assert kernels.rms_norm(size, dtype=dtype) == (runs, size)
    assert kernels.add_norm is TORCH.add_norm and kernels.name == "triton"


def test_a_tile_is_part_of_its_variant_s_name_and_arguments() -> None:
    variant = tiled("triton", Tile(16, 64, 128, 4, 3), lambda x, tile: (x, tile.columns), 2.0)
    assert variant.name == "triton 16x64x128 w4 s3"
    assert (variant.run(7), variant.early_s) == ((7, 64), 2.0)
    assert [rounded_up(size) for size in (0, 1, 2, 3, 64, 65)] == [1, 1, 2, 4, 64, 128]
