"""What Triton's kernels say of their variants, on inputs of every dtype that they take."""

from typing import Any

import pytest
import torch

from tests.helpers.triton_device import DEVICE  # isort: skip
from benchmarks.gpu.cases import cases
from benchmarks.gpu.shapes import TOY, Work
from diffray.kernels.choose import TORCH
from diffray.kernels.triton.table import KERNELS
from diffray.kernels.variants import Kernel, Shape, Variant


class Call:
    """Stands for a kernel: notes the shape of each call, and the variants it could run."""

    def __init__(self, kernel: Kernel) -> None:
        self.kernel = kernel
        self.seen: list[tuple[Shape, list[Variant]]] = []

    def __call__(self, *args: object, **options: object) -> object:
        kernel = self.kernel
        self.seen.append((kernel.shape(*args, **options), kernel.variants(*args, **options)))
        return kernel.reference(*args, **options)


def noted(dtype: torch.dtype, work: Work) -> list[Call]:
    calls = [Call(kernel) for kernel in KERNELS]
    replaced: dict[str, Any] = {call.kernel.name: call for call in calls}
    kernels = TORCH._replace(**replaced)
    for name in TOY:
        for case in cases(TOY[name], work, dtype, DEVICE):
            case.run(kernels)
    return calls


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_variants_have_names_of_their_own_and_depend_on_the_shape_alone(dtype: torch.dtype) -> None:
    near = noted(dtype, Work(2, 5, 21)), noted(dtype, Work(2, 6, 21))
    for call, other in zip(*near, strict=True):
        for one, two in zip(call.seen, other.seen, strict=True):
            names = [variant.name for variant in one[1]]
            assert len(set(names)) == len(names) > 1 and names[-1] == "torch"
            if one[0] == two[0]:
                assert names == [variant.name for variant in two[1]]
    assert [call.kernel.name for call in near[0] if not call.seen] == []
