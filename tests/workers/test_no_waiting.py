"""Steps inside a round ask nothing of the device that the host would have to wait for."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from diffray.components.params import SamplingParams
from diffray.workers.batch_plan import BatchPlan
from diffray.workers.messages import Request
from tests.helpers.mixed_requests import BOTH, Policies
from tests.helpers.toy import ToyModel, prompt_of, run, toy_engine

WAITING = {"aten::_local_scalar_dense", "aten::nonzero", "aten::masked_select", "aten::_unique2"}


class NoWaiting(TorchDispatchMode):
    """Refuses operations whose result's size or value the host needs to go on."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch does not say

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert func._schema.name not in WAITING, f"{func} waits for the device"
        if func._schema.name in ("aten::index", "aten::index_put", "aten::index_put_"):
            dtypes = {index.dtype for index in args[1] if index is not None}
            assert torch.bool not in dtypes, f"{func} by a mask waits for the device"
        return func(*args, **(kwargs or {}))


def watched(denoise: Callable[..., None]) -> Callable[..., None]:
    """Let a round's first step plan, and watch the others."""

    def step(plan: BatchPlan, number: int, chunks: Any) -> None:
        if number == 0:
            return denoise(plan, number, chunks)
        with NoWaiting():
            return denoise(plan, number, chunks)

    return step


@BOTH
def test_no_step_but_the_first_waits(
    model: ToyModel, policies: Policies, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For every decoder, with filters and guidance; windows stay, as without a cache they do."""
    requests = []
    for uid, policy in enumerate(policies):
        if policy.get("iteration") == {"kind": "first_token"}:
            continue  # its second step asks for more positions, so it is planned like a first
        params = SamplingParams(
            max_tokens=20,
            ignore_eos=True,
            min_tokens=uid,
            logit_bias={5: 1.0} if uid % 2 else {},
            diffusion=policy | {"cache": {"kind": "none"}},
        )
        requests.append(Request(uid, prompt_of(9, seed=uid), params))
    # Else rounds would often have one step.
    monkeypatch.setattr("diffray.workers.engine.steps_ahead", lambda _: 4)
    expected = run(toy_engine(model), requests, steps=4)
    monkeypatch.setattr(BatchPlan, "denoise", watched(BatchPlan.denoise))
    assert run(toy_engine(model), requests, steps=4) == expected
