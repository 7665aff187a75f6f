"""Every kernel of the table passes the comparison by which a GPU's kernels are checked."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.helpers.triton_device import DEVICE  # isort: skip
from tests.helpers.triton_bfloat16 import exact_bfloat16  # isort: skip
from benchmarks.gpu.cases import cases
from benchmarks.gpu.shapes import TOY, Work
from diffray.kernels.choose import TORCH
from diffray.kernels.kernel import Kernel
from diffray.kernels.triton.table import KERNELS
from diffray.kernels.verify import verified


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_kernel_is_found_right(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    found: dict[str, str] = {}

    def checking(kernel: Kernel) -> Callable[..., Any]:
        def run(*args: Any, **options: Any) -> Any:
            out, why = verified(kernel, args, options)
            found[kernel.name] = found.get(kernel.name) or why
            return out

        return run

    checked: dict[str, Any] = {kernel.name: checking(kernel) for kernel in KERNELS}
    with exact_bfloat16():
        for shape in TOY.values():
            for case in cases(shape, Work(2, 5, 21), dtype, DEVICE):
                case.run(TORCH._replace(**checked))
    assert found == dict.fromkeys(checked, "")
