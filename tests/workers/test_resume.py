"""A request whose engine is lost resumes in another, from its updates alone, to the same text."""

from collections.abc import Sequence as Items
from dataclasses import fields, replace
from functools import cache, partial

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from diffray.components.params import SamplingParams
from diffray.workers.messages import Request, Resume, Update
from tests.helpers.mixed_requests import (
    BIDIRECTIONAL,
    CAUSAL,
    MIXED,
    MIXED_CAUSAL,
    SHIFTED_CAUSAL,
    SUB_BLOCK,
    mixed_requests,
)
from tests.helpers.resuming import cut_and_resume, updates_of
from tests.helpers.toy import EOS, ScriptedModel, ToyModel, certain, prompt_of, toy_engine

MIXTURES: dict[str, tuple[ToyModel, list[dict[str, object]]]] = {
    "bi": (BIDIRECTIONAL, MIXED),
    "causal": (CAUSAL, MIXED_CAUSAL),
    "shifted": (SHIFTED_CAUSAL, MIXED_CAUSAL[-2:] + SUB_BLOCK),
}


def story(updates: Items[Update], uid: int) -> dict[str, object]:
    """Return all that one request's updates say, however they are divided, but the work done."""
    mine = [update for update in updates if update.uid == uid]
    joined: dict[str, object] = {"finish": [u.finish_reason for u in mine if u.finish_reason]}
    for name in ("ids", "steps", "logprobs", "top_logprobs"):
        joined[name] = [each for update in mine for each in getattr(update, name)]
    return joined | {"stop_id": mine[-1].stop_id, "fields": mine[-1].fields}


@cache
def ranked_request(mixture: str, uid: int) -> tuple[Request, dict[str, object]]:
    """Return a request of the mixture, with rankings, and its story where nothing is cut."""
    model, policies = MIXTURES[mixture]
    requests = mixed_requests(policies)
    request = requests[uid % len(requests)]
    ranked = {"logprobs": True, "top_logprobs": 3}
    request = replace(request, params=request.params.model_copy(update=ranked))
    whole = updates_of(toy_engine(model), [request], 1)
    return request, story(whole, request.uid)


@pytest.mark.long
@pytest.mark.parametrize("mixture", MIXTURES)
@settings(max_examples=15)
@given(
    uid=st.integers(0, len(MIXED) - 1),
    steps=st.integers(1, 4),
    cuts=st.lists(st.integers(0, 30), min_size=1, max_size=2),
)
def test_any_cut_changes_nothing(mixture: str, uid: int, steps: int, cuts: list[int]) -> None:
    request, whole = ranked_request(mixture, uid)
    found = cut_and_resume(partial(toy_engine, MIXTURES[mixture][0]), [request], steps, cuts)
    assert story(found, request.uid) == whole


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("early_stop", [False, True])
@pytest.mark.parametrize("where", [3, 8, 15, 20])
@pytest.mark.rotate(6)
def test_end_token_is_reported_once(causal: bool, early_stop: bool, where: int) -> None:
    """Also where the blocks after it are still to be denoised, and in the last place of all."""
    script = {6 + where: EOS, 6 + where + 1: EOS, 6 + where + 9: EOS}
    model = ScriptedModel(certain(script), block_causal=causal)
    kind = "block_diffusion" if causal else "blockwise"
    diffusion = {
        "block_length": 8,
        "iteration": {"kind": kind, "early_stop": early_stop},
        "decoder": {"kind": "fixed", "steps": 16},
    }
    request = Request(0, prompt_of(6), SamplingParams(max_tokens=21, diffusion=diffusion))
    whole = updates_of(toy_engine(model), [request], 1)
    assert story(whole, 0)["stop_id"] == EOS
    for cut in range(whole[-1].forwards):
        found = cut_and_resume(partial(toy_engine, model), [request], 1, [cut])
        assert story(found, 0) == story(whole, 0)


def test_only_the_current_block_is_done_again() -> None:
    for model, policies in ((BIDIRECTIONAL, MIXED), (CAUSAL, MIXED_CAUSAL)):
        (request,) = [r for r in mixed_requests(policies) if r.params.diffusion.block_length == 8]
        whole = updates_of(toy_engine(model), [request], 1)
        found = cut_and_resume(partial(toy_engine, model), [request], 1, [9])
        resumed = Resume.after(found[: len(updates_of(toy_engine(model), [request], 1, 9))])
        assert resumed.progress.blocks > 0
        assert whole[-1].forwards < found[-1].forwards <= whole[-1].forwards + 8


def test_nothing_to_resume_is_a_new_request() -> None:
    assert Resume.after([]) == Resume()
    request = mixed_requests(MIXED)[0]
    begun = replace(request, resume=Resume())
    found, plain = (updates_of(toy_engine(BIDIRECTIONAL), [r], 1) for r in (begun, request))
    assert found == plain


def test_the_story_leaves_out_only_the_work() -> None:
    engine = toy_engine(ScriptedModel(certain({})))
    told = {*story(updates_of(engine, [mixed_requests(MIXED)[0]], 1), 0)}
    assert {f.name for f in fields(Update)} - told == {
        "uid", "finish_reason", "forwards", "progress", "canvas", "cached_tokens",
        "ran", "version", "approximate",
    }  # fmt: skip
