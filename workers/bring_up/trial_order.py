"""The order in which variants are tried: those predicted to save the most in a step come first.

There may be no time for all of them; then the next start continues.
"""

import re
from typing import Final

from diffray.kernels.variants import TORCH_VARIANT

# The kernels and variants that the prediction in docs/gpu.md counts on, the largest gain first: in
# a step of 32 sequences, then of one.
EXPECTED: Final = (
    r"quantized_linear scaled_mm( fast)?( pdl)?",
    r"\w*experts_\w+ triton (fused |half )?(pdl )?128x128x64 w8 s3",
    r"float8_experts_forward scaled_grouped_mm( pdl)?",
    r"confidence triton after product( pdl)?",
    r"quantized_linear triton (half )?(pdl )?(16|32|64)x128x128 w8 s3",
    r"\w*experts_\w+ triton (fused |half )?(pdl )?64x64x64 w4 s4",
    r"\w+_router triton fused( pdl)?",
    r"\w*experts_\w+ triton (fused |half )?stay (pdl )?\d+x64x64 w4 s4",
    r"linear_add_norm triton fused( pdl)?",
    r"\w*attend triton (64|128) keys (pdl )?\d+x64x\d+ w4 s3",
    r"confidence triton (pdl )?\d+x256x64 w8 s3",
    r"\w+ triton pdl",
    r"experts_\w+ flashinfer",  # not predicted, but it need not be compiled
)


def rank(kernel: str, variant: str, *, index: int) -> tuple[int, int]:
    """Return the sort key of a shape's variant; `index` is its place in the kernel's list.

    The default, whose index is 0, comes first: whatever there is no time for, the choice is never
    slower than it. torch's, which runs where nothing else is right, comes after the expected ones.
    """
    if index == 0:
        return -1, 0
    name = f"{kernel} {variant}"
    found = (place for place, pattern in enumerate(EXPECTED) if re.fullmatch(pattern, name))
    expected = next(found, len(EXPECTED) + (variant != TORCH_VARIANT))
    # Of the expected variants, those that start early come first.
    return expected, index if expected > len(EXPECTED) else " pdl" not in variant
