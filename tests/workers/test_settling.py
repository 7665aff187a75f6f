"""One kernel at the end of a step does what the decoders and the state of the batch do."""

from typing import Any

import pytest
import torch

from diffray import SamplingParams
from diffray.kernels.acceptance import settle
from diffray.kernels.choose import TORCH
from diffray.workers.batch_state import BatchState
from diffray.workers.engine import Engine
from diffray.workers.messages import Request
from tests.helpers.mixed_requests import BIDIRECTIONAL, CAUSAL
from tests.helpers.toy import ToyModel, prompt_of, toy_engine

Found = dict[int, list[tuple[Any, ...]]]
SETTLED: list[dict[str, Any]] = [
    {"decoder": {"kind": "threshold", "threshold": 0.6}},
    {"decoder": {"kind": "threshold", "threshold": 0.5, "steps_per_block": 3}, "block_length": 11},
    {"decoder": {"kind": "fixed", "steps": 17}, "block_length": 8},
    {"decoder": {"kind": "fixed", "steps": 3}, "block_length": 5},
]
CREDIT = {"decoder": {"kind": "credit", "threshold": 0.7}, "block_length": 16}
SUB_BLOCKS = {
    "decoder": {"kind": "threshold", "threshold": 0.3},
    "iteration": {"kind": "sub_blocks", "sub_block_length": 4},
    "block_length": 16,
}
FIRST = {"decoder": {"kind": "fixed", "steps": 20}, "iteration": "first_token", "block_length": 16}


def requests_of(policies: list[dict[str, Any]]) -> list[Request]:
    """Return requests of several lengths, half of which draw: not beside credit."""
    found, remembering = [], CREDIT in policies
    for uid, policy in enumerate(policies * 2):
        draws = uid >= len(policies) and not remembering
        params = SamplingParams(
            max_tokens=20 + 3 * uid, seed=uid, temperature=0.8 * draws, diffusion=policy
        )
        found.append(Request(uid, prompt_of(5 + 4 * uid), params))
    return found


def everything(engine: Engine, requests: list[Request], steps: int = 1) -> Found:
    """Return each token with its step and log-probability; requests join one after the other."""
    found: Found = {request.uid: [] for request in requests}
    waiting = [*requests]
    while waiting or not engine.idle:
        if waiting:
            engine.add(waiting.pop(0))
        for update in engine.step(steps):
            found[update.uid] += zip(update.ids, update.steps, update.logprobs, strict=True)
    return found


def watched(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Let the engine settle where it can; note how each step ends."""
    seen: list[str] = []
    accept = BatchState.accept

    def settled(*args: Any) -> None:
        seen.append("settle")
        settle(*args)

    def accepted(*args: Any) -> None:
        seen.append("accept")
        accept(*args)

    engine.kv.kernels = TORCH._replace(name="other", settle=settled)
    monkeypatch.setattr(BatchState, "accept", accepted)
    return seen


def check(found: Found, expected: Found) -> None:
    for uid, tokens in expected.items():
        assert [token[:2] for token in found[uid]] == [token[:2] for token in tokens]
        ours, theirs = (torch.tensor([token[2] for token in each]) for each in (found[uid], tokens))
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    ("model", "policies"),
    [
        (BIDIRECTIONAL, [*SETTLED, FIRST]),
        (BIDIRECTIONAL, [*SETTLED, CREDIT]),
        (CAUSAL, [*SETTLED, SUB_BLOCKS]),
        (CAUSAL, [*SETTLED, CREDIT]),
    ],
    ids=["bi", "bi credit", "causal", "causal credit"],
)
@pytest.mark.parametrize("steps", [1, 3])
@pytest.mark.rotate(3)
def test_the_usual_decoders_end_their_steps_in_one_kernel(
    model: ToyModel, policies: list[dict[str, Any]], steps: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Together, of several block lengths, joining and leaving at any time, and one by one."""
    monkeypatch.setattr("diffray.workers.engine.steps_ahead", lambda _: steps)
    requests = requests_of(policies)
    expected = everything(toy_engine(model), requests, steps)
    engine = toy_engine(model)
    seen = watched(engine, monkeypatch)
    check(everything(engine, requests, steps), expected)
    for request in requests:
        check(everything(engine, [request], steps), {request.uid: expected[request.uid]})
    assert set(seen) == {"settle"}


OTHERS: list[dict[str, Any]] = [
    {"diffusion": {"decoder": {"kind": "fixed", "remasking": "random"}}},
    {"diffusion": {"decoder": {"kind": "factor"}}},
    {"diffusion": {"decoder": {"kind": "edit"}}},
    {"diffusion": {"decoder": {"kind": "credit"}}, "temperature": 0.7},
    {"diffusion": {"decoder": {"kind": "threshold"}, "iteration": {"kind": "soft"}}},
    {"diffusion": {"decoder": {"kind": "threshold"}, "cfg_scale": 0.5}},
    {"diffusion": {"speculation": {"kind": "verify"}}},
    {"top_logprobs": 2, "logprobs": True},
    {"logit_bias": {3: 2.0}},
    {"temperature": 0.7, "top_k": 3},
    {"max_tokens": 130, "diffusion": {"block_length": 65}},
]


@pytest.mark.parametrize("options", OTHERS, ids=str)
@pytest.mark.rotate(3)
def test_a_row_that_needs_more_takes_its_batch_along(
    options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    diffusion = {"block_length": 8} | options.get("diffusion", {})
    params = SamplingParams(**({"max_tokens": 16} | options | {"diffusion": diffusion}))
    plain = SamplingParams(max_tokens=150, ignore_eos=True, diffusion={"block_length": 8})
    requests = [Request(0, prompt_of(6), params), Request(1, prompt_of(9), plain)]
    expected = everything(toy_engine(BIDIRECTIONAL), requests)
    engine = toy_engine(BIDIRECTIONAL)
    seen = watched(engine, monkeypatch)
    check(everything(engine, requests[:1]), {0: expected[0]})
    assert set(seen) == {"accept"}
    seen.clear()
    check(everything(engine, requests), expected)
    assert seen[-1] == "settle" and "accept" in seen  # the other one is alone in the end


def test_a_row_that_needs_no_more_is_settled_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """End tokens are forbidden among the first tokens only."""
    params = SamplingParams(max_tokens=32, min_tokens=4, diffusion={"block_length": 8})
    request = Request(0, prompt_of(8), params)
    expected = everything(toy_engine(BIDIRECTIONAL), [request])
    engine = toy_engine(BIDIRECTIONAL)
    seen = watched(engine, monkeypatch)
    check(everything(engine, [request]), expected)
    assert seen[0] == "accept" and seen[-1] == "settle"
