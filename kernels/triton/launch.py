"""Programmatic dependent launch: a kernel is launched before the previous one has ended.

Its programs fetch weights, which no kernel writes, then wait for the previous kernel's results.
Every program of such a kernel waits, so when it has ended, all earlier kernels have ended too.
Needs compute capability 9.0.
"""

from functools import cache

import triton
import triton.language as tl

from diffray.kernels.kernel import Tile


@cache
def can_overlap() -> bool:
    """Return whether the current GPU can launch a kernel before the previous one has ended."""
    if triton.knobs.runtime.interpret:
        return False
    target = triton.runtime.driver.active.get_current_target()
    return bool(target.backend == "cuda" and target.arch >= 90)


@cache
def _little_shared_memory() -> bool:
    """Return whether a program has 99 KiB of shared memory, not 163 or 227."""
    if triton.knobs.runtime.interpret:
        return False
    target = triton.runtime.driver.active.get_current_target()
    return bool(target.backend == "cuda" and (target.arch in (86, 89) or target.arch >= 120))


def staged(tile: Tile) -> dict[str, int]:
    """Return a tile's launch options, with a stage fewer where its buffers would not fit."""
    fewer = _little_shared_memory() and tile.stages > 2
    return {"num_warps": tile.warps, "num_stages": tile.stages - fewer}


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
        row = tl.minimum(rows, num_rows - 1).to(tl.int64)
        line = w_ptr + row[:, None] * size + at[None, :]
        tl.inline_asm_elementwise(
            "prefetch.global.L2 [$1]; mov.u32 $0, 0;",
            "=r,l",
            [line.to(tl.int64)],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )
