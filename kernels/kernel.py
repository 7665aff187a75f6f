"""A kernel: its torch reference and its Triton program, which compute the same."""

from collections.abc import Callable
from collections.abc import Sequence as Items
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from diffray.kernels.numeric_errors import largest_error

Run = Callable[..., Any]

# The largest error of a program, by the dtype that it computes in: twice the error of torch's
# experts, the least exact kernel, against exact sums of 2,048 numbers.
TOLERANCE: Final = {
    torch.float64: 2e-4,
    torch.float32: 2e-4,
    torch.float16: 6e-3,
    torch.bfloat16: 5e-2,
}


class Tile(NamedTuple):
    """How a program tiles its matrices and is launched."""

    rows: int
    columns: int
    depth: int
    warps: int
    stages: int


def _nothing(*_: Any, **__: Any) -> tuple[Tensor, ...]:
    return ()


def _of_first(first: Tensor, *_: Any, **__: Any) -> torch.dtype:
    return first.dtype


@dataclass(frozen=True, slots=True)
class Kernel:
    """A kernel; all functions here take the arguments of the reference."""

    name: str  # its field in `Kernels`
    reference: Run
    program: Run  # also takes `pdl`: whether to launch before the previous kernel has ended
    written: Callable[..., Items[Tensor]] = _nothing  # arguments that it stores to
    # The error of outputs and stored tensors, given the arguments and the reference's tensors.
    error: Callable[[Items[Any], Items[Tensor], Items[Tensor]], float] = largest_error
    tolerance: float = 1.0  # a multiple of the dtype's, depending on what the kernel rounds
    precision: Callable[..., torch.dtype] = _of_first  # the dtype whose tolerance applies

    def allowed(self, *args: Any, **options: Any) -> float:
        """Return the largest error that the program may have."""
        return TOLERANCE[self.precision(*args, **options)] * self.tolerance
