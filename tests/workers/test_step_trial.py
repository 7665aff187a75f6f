"""What is tried of a model: its calls, then kernels together in steps, launched and recorded."""

from typing import Any
from unittest.mock import Mock

import pytest
import torch

from tests.helpers import triton_device  # isort: skip  # noqa: F401
from diffray.kernels.choose import TORCH
from diffray.kernels.triton import table
from diffray.workers.bring_up.findings import Findings
from diffray.workers.bring_up.one_layer import OneLayer, Sizes
from diffray.workers.bring_up.step_trial import combined, try_graphs
from diffray.workers.bring_up.trial_process import Calls, collecting, trials_of
from diffray.workers.engine_options import EngineOptions
from tests.helpers import stand_in_kernels
from tests.helpers.replays import again, frozen
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

    message = combined(SIZES, CPU, TORCH._replace(rms_norm=norm))
    assert message == "100% of a step's rows differ from those of the same kernels one at a time"
    assert combined(SIZES, CPU, TORCH) == ""


@pytest.mark.parametrize(
    ("record", "message"),
    [
        (frozen, "100% of the rows of 1 x 32 positions differ between replays and"),
        (
            Mock(side_effect=RuntimeError("operation not permitted")),
            "a step could not be recorded: RuntimeError: operation not permitted",
        ),
    ],
)
def test_graphs_are_refused_when_replays_differ_or_recording_fails(
    record: Any, message: str
) -> None:
    layer = OneLayer(SIZES, CPU, TORCH)
    outcome = try_graphs(layer, record)
    assert outcome.refused.startswith(message)
    found = Findings(graphs=outcome)
    assert [*found.lines()] == [f"cuda_graphs: off: {outcome.refused}"]
    assert found.applied_to(EngineOptions()).cuda_graphs is False
    with pytest.raises(ValueError, match="cuda_graphs cannot be used on this GPU: "):
        found.applied_to(EngineOptions(cuda_graphs=True))


@pytest.mark.parametrize("name", CONFIGS)
def test_recorded_steps_of_every_family_are_compared(name: str) -> None:
    layer = OneLayer(Sizes(config=CONFIGS[name], dtype="float32"), CPU, TORCH)
    outcome = try_graphs(layer, again)
    # On a CPU copying the outputs may well take longer than it saves.
    assert outcome.refused in ("", "replays take longer than launched steps")
    assert outcome.launched_s is not None and outcome.launched_s > 0


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("ranks", [1, 2])
def test_the_trials_are_of_the_calls_that_the_model_makes(name: str, ranks: int) -> None:
    """Every kernel of the table that the family uses, at every size, on two kinds of inputs."""
    calls: Calls = {}
    sizes = Sizes(config=CONFIGS[name], dtype="float32", ranks=ranks)
    OneLayer(sizes, CPU, collecting(table.KERNELS, calls)).run()
    kernels = {kernel for kernel, _ in calls}
    routers = {name: {"softmax_router"} for name in ("llada_moe", "sdar_moe")}
    routers["llada2_moe"] = {"grouped_sigmoid_router"}
    sparse = "experts_add_norm" if ranks == 1 else "experts_forward"
    experts = {sparse} if name in routers else set()
    shared = {"rms_norm", "attend", "confidence", "reward", "settle"}
    if ranks == 1:
        shared.add("linear_add_norm")
    if ranks > 1 or name not in routers:
        shared.add("add_norm")
    assert kernels == shared | routers.get(name, set()) | experts
    for kernel in kernels - {"confidence"}:
        shapes = [shape for owner, shape in calls if owner == kernel]
        fewest = 3 if kernel == "reward" else 4  # as drawing, of one and of many windows
        assert len(shapes) >= fewest and len({shape.facts for shape in shapes}) == 1
    assert all(len(own) > 1 for own in calls.values())
    asked = {shape.facts[-1] for kernel, shape in calls if kernel == "confidence"}
    assert asked == {"best", "drawn"}


@pytest.mark.parametrize(
    ("ranks", "name"), [(1, "experts_add_norm"), (2, "quantized_experts_forward")]
)
def test_quantized_experts_are_tried_as_they_are_stored(ranks: int, name: str) -> None:
    calls: Calls = {}
    sizes = Sizes(config=LLADA_MOE, dtype="float32", quantization="experts_int8", ranks=ranks)
    OneLayer(sizes, CPU, collecting(table.KERNELS, calls)).run()
    own = [shape for kernel, shape in calls if kernel == name]
    assert own and all("torch.int8" in shape.facts for shape in own)


def test_defaults_come_first_then_the_others_in_turn_and_torch_last() -> None:
    """Were it first, a start that runs out of time would choose it for want of others."""
    calls: Calls = {}
    OneLayer(SIZES, CPU, collecting(stand_in_kernels.KERNELS, calls)).run()
    trials = trials_of(calls, [])
    sizes = len(calls) // 2
    names = [trial.variant.name for trial in trials]
    assert set(names[: 2 * sizes]) == {"wrong", "slow_sum"}
    assert names[2 * sizes : 3 * sizes] == ["crash"] * sizes
    assert set(names[-2 * sizes :]) == {"torch"}
    assert [trial.needed for trial in trials] == [True] * 2 * sizes + [False] * 7 * sizes
    done = [trials[0].begin]
    assert len(trials_of(calls, done)) == len(trials) - 1
