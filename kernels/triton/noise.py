"""The noise of kernels/noise.py inside Triton's kernels: the same integers, the same float64."""

import triton
import triton.language as tl


@triton.jit
def _mix(x):
    """Hash 32 bits, as `noise.mix` does."""
    x = (x ^ (x >> 16)) * 0x7FEB352D
    x = (x ^ (x >> 15)) * 0x846CA68B
    return x ^ (x >> 16)


@triton.jit
def gumbel(key, ids):
    """Return `noise.gumbel` of keys and ids: the same integers, then logarithms in float64."""
    hashed = _mix(key + _mix(ids * 0x9E3779B9 + 1))
    unit = (hashed.to(tl.float64) + 0.5) * 2.3283064365386963e-10
    return (-tl.log(-tl.log(unit))).to(tl.float32)
