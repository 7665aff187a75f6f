"""Forbidden and allowed ids, and the most probable ids of each token."""

from itertools import chain
from typing import Any

import pytest

from diffray.components.params import SamplingParams
from diffray.workers.messages import Request
from tests.helpers.mixed_requests import BIDIRECTIONAL, CAUSAL, MIXED, MIXED_CAUSAL
from tests.helpers.resuming import updates_of
from tests.helpers.toy import (
    EOS,
    MASK,
    VOCAB,
    ScriptedModel,
    ToyModel,
    generate,
    prompt_of,
    toy_engine,
)

BOTH = [
    *((BIDIRECTIONAL, policy) for policy in MIXED),
    *((CAUSAL, policy) for policy in MIXED_CAUSAL),
]


@pytest.mark.parametrize(("model", "policy"), BOTH)
@pytest.mark.parametrize("temperature", [0, 5.0])
@pytest.mark.rotate(6)
def test_only_what_is_allowed_is_written(
    model: ToyModel, policy: dict[str, Any], temperature: float
) -> None:
    given: dict[str, Any] = {"temperature": temperature, "diffusion": policy, "max_tokens": 40}

    def written(**choice: Any) -> set[int]:
        return {*generate(model, prompt_of(9), steps=3, seed=3, ignore_eos=True, **given, **choice)}

    free = written()
    often = sorted(free)[: len(free) // 2]
    assert often
    assert written(bad_token_ids=often).isdisjoint(often)
    assert written(allowed_token_ids=[4, 5, 61]) <= {4, 5, 61}
    assert written(allowed_token_ids=[4, 5, 61], bad_token_ids=[5]) <= {4, 61}
    assert written(allowed_token_ids=[MASK, 44]) == {44}
    assert written(allowed_token_ids=range(VOCAB)) == free


def test_end_tokens_stay_allowed_unless_they_come_too_early() -> None:
    model = ScriptedModel(lambda position: {EOS: 20.0, 1: 10.0, 2: 5.0})
    assert generate(model, prompt_of(6), max_tokens=9, allowed_token_ids=[2]) == [EOS]
    late = generate(model, prompt_of(6), max_tokens=9, allowed_token_ids=[2], min_tokens=3)
    assert late == [2, 2, 2, EOS]
    assert generate(model, prompt_of(6), max_tokens=9, bad_token_ids=[EOS]) == [1] * 9


def test_a_sequence_within_the_start_of_another_is_avoided_too() -> None:
    model = ScriptedModel(lambda at: {1 + at % 3: 9.0, 5: 1.0})
    avoided: dict[str, Any] = {"bad_token_sequences": [[1, 2, 3, 4], [2, 3]]}
    assert generate(model, prompt_of(6), max_tokens=6) == [1, 2, 3] * 2
    assert generate(model, prompt_of(6), max_tokens=6, **avoided).count(5) == 2


@pytest.mark.parametrize(("model", "policy"), BOTH)
@pytest.mark.parametrize("steps", [1, 4])
def test_rankings_begin_with_the_greedy_choice(
    model: ToyModel, policy: dict[str, Any], steps: int
) -> None:
    params = SamplingParams(
        max_tokens=30, ignore_eos=True, logprobs=True, top_logprobs=5, diffusion=policy
    )
    plain = params.model_copy(update={"top_logprobs": 0, "logprobs": False})
    requests = [Request(0, prompt_of(9), params), Request(1, prompt_of(12), plain)]
    found = updates_of(toy_engine(model), requests, steps)
    assert all(update.top_logprobs == [] for update in found if update.uid == 1)
    mine = [each for each in found if each.uid == 0]
    told = [zip(each.ids, each.logprobs, each.top_logprobs, strict=True) for each in mine]
    assert sum(len(each.ids) for each in mine) == 30
    for token, logprob, top in chain(*told):
        values = [value for _, value in top]
        assert top[0][0] == token and values[0] == pytest.approx(logprob, abs=1e-6)
        assert values == sorted(values, reverse=True)
        assert len(dict(top)) == 5 and MASK not in dict(top)


def test_rankings_leave_out_what_is_forbidden() -> None:
    params = SamplingParams(
        max_tokens=6, logprobs=True, top_logprobs=20, allowed_token_ids=[3, 8, 9], ignore_eos=True
    )
    found = updates_of(toy_engine(BIDIRECTIONAL), [Request(0, prompt_of(9), params)], 1)
    tops = [top for update in found for top in update.top_logprobs]
    assert [{token for token, _ in top} for top in tops] == [{3, 8, 9}] * 6
