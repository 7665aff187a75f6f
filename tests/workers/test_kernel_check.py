"""What is checked of a model: its calls, then kernels together in steps."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.helpers import triton_device  # isort: skip  # noqa: F401
from diffray.kernels.choose import TORCH, Kernels
from diffray.workers.bring_up.check import unlike
from diffray.workers.bring_up.one_layer import OneLayer, Sizes
from tests.helpers.tiny_checkpoints import (
    DREAM,
    FAST_DLLM_V2,
    LLADA,
    LLADA2_MOE,
    LLADA_MOE,
    SDAR,
    SDAR_MOE,
)

CPU = torch.device("cpu")
CONFIGS = {
    "llada": LLADA, "dream": DREAM, "fast_dllm_v2": FAST_DLLM_V2, "sdar": SDAR,
    "llada_moe": LLADA_MOE, "llada2_moe": LLADA2_MOE, "sdar_moe": SDAR_MOE,
}  # fmt: skip
SIZES = Sizes(config=LLADA_MOE, dtype="float32")


def test_kernels_that_do_not_wait_for_each_other_are_found_out() -> None:
    """Right while each is waited for; then the norm of every step is that of the step before."""
    waited_for, last = len(OneLayer(SIZES, CPU, TORCH).steps), [torch.zeros(1)]

    def norm(x: torch.Tensor, *args: Any) -> torch.Tensor:
        nonlocal waited_for
        waited_for -= 1
        last.append(TORCH.rms_norm(x, *args))
        return last[-1] if waited_for >= 0 else last[-1] + last[-2].mean()

    message = unlike(SIZES, CPU, TORCH._replace(rms_norm=norm))
    assert message == "100% of a step's rows differ from those of the same kernels one at a time"
    assert unlike(SIZES, CPU, TORCH) == ""


def called(sizes: Sizes) -> dict[str, int]:
    """Return how often a check calls each kernel."""
    calls: dict[str, int] = {}

    def noting(name: str) -> Callable[..., Any]:
        def run(*args: Any, **options: Any) -> Any:
            calls[name] = calls.get(name, 0) + 1
            return getattr(TORCH, name)(*args, **options)

        return run

    kernels = Kernels("noting", *map(noting, Kernels._fields[1:]))
    OneLayer(sizes, CPU, kernels).run()
    return calls


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("ranks", [1, 2])
def test_every_kernel_that_the_model_uses_is_called_at_every_size(name: str, ranks: int) -> None:
    """On two kinds of inputs."""
    calls = called(Sizes(config=CONFIGS[name], dtype="float32", ranks=ranks))
    routers = {name: {"softmax_router"} for name in ("llada_moe", "sdar_moe")}
    routers["llada2_moe"] = {"grouped_sigmoid_router"}
    sparse = "experts_add_norm" if ranks == 1 else "experts"
    experts = {sparse} if name in routers else set()
    shared = {"rms_norm", "attend", "confidence", "reward", "settle"}
    if ranks == 1:
        shared.add("linear_add_norm")
    if ranks > 1 or name not in routers:
        shared.add("add_norm")
    assert calls.keys() == shared | routers.get(name, set()) | experts
    # Two calls for each size; drawing, of one and of many windows alone.
    assert all(count >= (6 if kernel == "reward" else 8) for kernel, count in calls.items())


@pytest.mark.parametrize(("ranks", "name"), [(1, "experts_add_norm"), (2, "experts")])
def test_quantized_experts_are_checked_as_they_are_stored(ranks: int, name: str) -> None:
    sizes = Sizes(config=LLADA_MOE, dtype="float32", quantization="experts_int8", ranks=ranks)
    assert called(sizes)[name] >= 8
