"""Kernels that are wrong together, and recorded steps that differ, are refused."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from diffray.kernels.choose import TORCH
from diffray.workers.bring_up.findings import Findings
from diffray.workers.bring_up.one_layer import OneLayer, Sizes
from diffray.workers.bring_up.step_trial import combined, try_graphs
from diffray.workers.engine_options import EngineOptions
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


def record_again(work: Callable[[], Any]) -> Callable[[], Any]:
    """Stand for a recording: compute again, into the same tensors."""
    out = work()
    olds = (out,) if isinstance(out, torch.Tensor) else tuple(out)

    def replay() -> Any:
        new = work()
        for old, fresh in zip(olds, (new,) if len(olds) == 1 else new, strict=True):
            old.copy_(fresh)
        return out

    return replay


def record_nothing(work: Callable[[], Any]) -> Callable[[], Any]:
    """Stand for a recording whose replays do nothing."""
    out = work()
    return lambda: out


def record_fails(_work: Callable[[], Any]) -> Callable[[], Any]:
    raise RuntimeError("operation not permitted when stream is capturing")


@pytest.mark.parametrize(
    ("record", "message"),
    [
        (record_nothing, "100% of the rows of 1 x 32 positions differ between replays and"),
        (record_fails, "a step could not be recorded: RuntimeError: operation not permitted"),
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
    outcome = try_graphs(layer, record_again)
    # On a CPU copying the outputs may well take longer than it saves.
    assert outcome.refused in ("", "replays take longer than launched steps")
    assert outcome.launched_s is not None and outcome.launched_s > 0
