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


def ran(choices: Choices, size: int, **options: str) -> str:
    run: Any = with_variants("triton", [KERNEL], choices).rms_norm
    name, given = run(size, **options)
    assert given == size
    return str(name)


def test_the_nearest_known_size_decides() -> None:
    known = {("rms_norm", shape(16)): "wide", ("rms_norm", shape(1024)): "narrow"}
    sizes = 1, 16, 60, 128, 129, 5000
    found = [ran(Choices(known), size) for size in sizes]
    assert found == ["wide", "wide", "wide", "wide", "narrow", "narrow"]


def test_other_facts_and_other_kernels_decide_nothing() -> None:
    known = {("rms_norm", shape(16)): "wide", ("add_norm", shape(16, "float16")): "wide"}
    assert ran(Choices(known), 16, dtype="float16") == "default"


@pytest.mark.parametrize(("right", "runs"), [(NAMES[1:], "wide"), ((), "torch")])
def test_where_no_choice_fits_only_what_is_right_elsewhere_runs(
    right: tuple[str, ...], runs: str
) -> None:
    verified = frozenset(("rms_norm", name) for name in right)
    tried = Choices({}, verified, frozenset({"rms_norm"}))
    assert ran(tried, 16) == runs


def test_the_default_runs_while_nothing_was_tried() -> None:
    assert ran(UNTRIED, 16) == "default"
    assert ran(Choices({}, tried=frozenset({"add_norm"})), 16) == "default"


def test_a_choice_that_no_longer_exists_gives_way_to_the_next_nearest() -> None:
    known = {("rms_norm", shape(16)): "gone", ("rms_norm", shape(64)): "narrow"}
    assert ran(Choices(known), 16) == "narrow"


def test_torch_can_be_the_choice_and_kernels_outside_the_table_are_torch_s() -> None:
    assert ran(Choices({("rms_norm", shape(16)): "torch"}), 16) == "torch"
    kernels = with_variants("triton", [KERNEL], Choices({}))
    assert kernels.add_norm is TORCH.add_norm and kernels.name == "triton"


def test_a_tile_is_part_of_its_variant_s_name_and_arguments() -> None:
    variant = tiled("triton", Tile(16, 64, 128, 4, 3), lambda x, tile: (x, tile.columns), 2.0)
    assert variant.name == "triton 16x64x128 w4 s3"
    assert (variant.run(7), variant.early_s) == ((7, 64), 2.0)


def test_sizes_round_up_to_powers_of_two() -> None:
    assert [rounded_up(size) for size in (0, 1, 2, 3, 64, 65)] == [1, 1, 2, 4, 64, 128]
