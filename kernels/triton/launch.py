"""Programmatic dependent launch: a kernel is launched before the previous one has ended.

Its programs fetch weights, which no kernel writes, then wait for the previous kernel's results.
Every program of such a kernel waits, so when it has ended, all earlier kernels have ended too.
Needs compute capability 9.0.
"""

from collections.abc import Sequence as Items
from functools import cache, partial
from typing import Final

import torch
import triton
import triton.language as tl

from diffray.kernels.variants import Run, Tile, Variant, tiled

_PER_MULTIPROCESSOR: Final = 2  # persistent programs
_MULTIPROCESSORS: Final = {"meta": 132, "cpu": 2}  # assumed for devices that have none
EARLY_S: Final = 2e-6  # what a kernel that starts early may save: its launch, and its first loads


def can_overlap() -> bool:
    """Return whether the current GPU can launch a kernel before the previous one has ended."""
    if triton.knobs.runtime.interpret:
        return False
    target = triton.runtime.driver.active.get_current_target()
    return bool(target.backend == "cuda" and target.arch >= 90)


def can_fetch() -> bool:
    """Return whether there is an L2 cache to fetch to."""
    return not triton.knobs.runtime.interpret


def num_programs(tiles: int, device: torch.device) -> int:
    """Return how many programs can run at the same time and share the tiles equally."""
    rounds = -(-tiles // _places(device))
    return -(-tiles // rounds)


@cache
def _places(device: torch.device) -> int:
    if device.type in _MULTIPROCESSORS:
        return _PER_MULTIPROCESSOR * _MULTIPROCESSORS[device.type]
    return _PER_MULTIPROCESSOR * int(torch.cuda.get_device_properties(device).multi_processor_count)


def variants_of(run: Run, program: str = "triton") -> list[Variant]:
    """Return a program as it is and, if the GPU can, launched early."""
    if not can_overlap():
        return [Variant(program, run)]
    early = Variant(f"{program} pdl", partial(run, pdl=True), early_s=EARLY_S)
    return [Variant(program, run), early]


def tiled_variants(
    tiles: Items[Tile], run: Run, program: str = "triton", early_s: float = EARLY_S
) -> list[Variant]:
    """Return a program with each tile, launched early if the GPU can; the first tile also not."""
    if not can_overlap():
        return [tiled(program, tile, run) for tile in tiles]
    early = (tiled(f"{program} pdl", tile, partial(run, pdl=True), early_s) for tile in tiles)
    return [tiled(program, tiles[0], run), *early]


def overlapped(pdl: bool) -> dict[str, bool]:
    """Return the launch options of a kernel that takes PDL."""
    return {"PDL": True, "launch_pdl": True} if pdl else {"PDL": False}


@triton.jit
def wait_for_previous(PDL: tl.constexpr):
    """Let the next kernel launch, then wait for the previous one's results."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()


@triton.jit
def prefetch_rows(w_ptr, rows, num_rows, size, DEPTH: tl.constexpr, FETCH: tl.constexpr):
    """Bring the first elements of some rows of a matrix to the L2 cache."""
    if FETCH:
        width: tl.constexpr = w_ptr.dtype.element_ty.primitive_bitwidth // 8
        lines: tl.constexpr = triton.next_power_of_2((DEPTH * width + 127) // 128)  # of 128 bytes
        at = tl.minimum(tl.arange(0, lines) * (128 // width), tl.minimum(DEPTH, size) - 1)
        line = w_ptr + tl.minimum(rows, num_rows - 1)[:, None] * size + at[None, :]
        tl.inline_asm_elementwise(
            "prefetch.global.L2 [$1]; mov.u32 $0, 0;",
            "=r,l",
            [line.to(tl.int64)],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )
