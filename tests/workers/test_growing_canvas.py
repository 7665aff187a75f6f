"""A growing canvas of a bidirectional model: max_tokens is a limit, and does not change a token."""

from typing import Any

import pytest

from diffray.cluster.control.request_queue import QueuedRequest
from diffray.components.config import InvalidField
from diffray.components.params import SamplingParams
from diffray.workers.admission import check_request
from diffray.workers.messages import Request
from tests.helpers.mixed_requests import BIDIRECTIONAL, CAUSAL, MIXED, SHIFTED
from tests.helpers.toy import (
    EOS,
    ScriptedModel,
    ToyModel,
    certain,
    last_update,
    prompt_of,
    run,
    toy_engine,
)
from tests.helpers.toy import generate as generated

CANVAS = 24


def growing(policy: dict[str, Any], length: int = CANVAS) -> dict[str, Any]:
    return policy | {"canvas": "growing", "canvas_length": length}


PENALIZED: dict[str, Any] = {"temperature": 0.7, "seed": 5, "frequency_penalty": 0.4}
WITHOUT_WORDS: dict[str, Any] = {"bad_token_sequences": ((7, 8), (3, 4, 5), (20, 21))}
PLAIN: list[dict[str, Any]] = [
    {"decoder": {"kind": "sequential"}},
    {"decoder": {"kind": "threshold"}, "speculation": {"kind": "verify", "drafts": 2}},
    {"iteration": {"kind": "blockwise", "early_stop": False}},
]


@pytest.mark.parametrize(
    ("policy", "more"),
    [
        *((policy, PENALIZED) for policy in MIXED),
        *((policy, WITHOUT_WORDS) for policy in MIXED[:2]),
        *((policy, {}) for policy in PLAIN),
    ],
)
@pytest.mark.parametrize("model", [BIDIRECTIONAL, SHIFTED], ids=["plain", "shifted"])
@pytest.mark.rotate(12)
def test_a_lower_limit_only_cuts_the_answer(
    model: ToyModel, policy: dict[str, Any], more: dict[str, Any]
) -> None:
    params: dict[str, Any] = {"diffusion": growing(policy), "ignore_eos": True} | more
    longest = generated(model, prompt_of(13), max_tokens=90, **params)
    assert len(longest) == 90
    for limit in (1, 23, 25, 89):
        assert generated(model, prompt_of(13), max_tokens=limit, **params) == longest[:limit]


@pytest.mark.parametrize("kind", ["threshold", "fixed", "schedule"])
@pytest.mark.parametrize("cache", ["none", "dual", "prefix"])
def test_what_is_added_is_denoised_as_a_canvas_after_a_longer_prompt(kind: str, cache: str) -> None:
    policy: dict[str, Any] = {"decoder": {"kind": kind}, "cache": {"kind": cache}}
    policy["block_length"] = 8
    prompt, parts = prompt_of(10), list[int]()
    fixed: dict[str, Any] = {"ignore_eos": True, "diffusion": policy | {"canvas": "fixed"}}
    for _ in range(3):
        parts += generated(BIDIRECTIONAL, (*prompt, *parts), max_tokens=CANVAS, **fixed)
    grown = fixed | {"diffusion": growing(policy)}
    assert generated(BIDIRECTIONAL, prompt, max_tokens=3 * CANVAS, **grown) == parts


def test_it_grows_up_to_the_context_and_stops_at_an_end_token() -> None:
    """The end token is in the second of three blocks; without early stop the canvas is filled."""
    model = ScriptedModel(certain({60: EOS}))
    for early in (True, False):
        policy = growing({"iteration": {"kind": "blockwise", "early_stop": early}}, length=96)
        request = Request(0, prompt_of(8), SamplingParams(max_tokens=400, diffusion=policy))
        engine = toy_engine(model)
        ids, last = last_update(engine, request)
        assert (len(ids), ids[-1], last.finish_reason) == (53, EOS, "stop")
        assert engine.forwards == (2 if early else 3)
    params = SamplingParams(max_tokens=512 - 8, diffusion=growing({}, length=200))
    never = toy_engine(ScriptedModel(certain({})))
    ids, last = last_update(never, Request(1, prompt_of(8), params))
    assert (len(ids), last.finish_reason) == (512 - 8, "length")


def test_pages_and_slots_are_those_of_the_canvas_so_far() -> None:
    """Two requests that could be long share memory that only one long one would fill."""
    model = ScriptedModel(certain({60: EOS}))
    params = SamplingParams(max_tokens=180, diffusion=growing({}))
    engine = toy_engine(model, num_pages=26)  # of 8 positions, one of them is never lent
    for uid in (0, 1):
        engine.add(Request(uid, prompt_of(10), params))
    engine.step()
    # The first block is done, so each has ten positions and two canvases of 32.
    assert len(engine.running) == 2 and engine.kv.num_free == 25 - 2 * 10
    rest = run(engine, [])
    assert [len(ids) for ids in rest.values()] == [51 - 32] * 2 and engine.preemptions == 0


@pytest.mark.parametrize("limit", [1, 20, 24, 25, 90, 96])
def test_a_resumed_request_is_expected_to_take_the_pages_of_its_canvas(limit: int) -> None:
    params = SamplingParams(max_tokens=limit, diffusion=growing({"block_length": 8}))
    limits = toy_engine(BIDIRECTIONAL, page_size=1, num_pages=600).limits
    checked = check_request(Request(0, prompt_of(10), params), limits)
    sequence = checked.new_sequence()
    while True:
        ids = sequence.canvas.final[:limit]
        queued = QueuedRequest(checked, checked.footprint, 0, None, 0, ids=ids)
        assert queued.needs == limits.pages(sequence, sequence.block.kv_stop)
        if sequence.in_last_block:
            break
        sequence.finish_block([5] * 8)


def test_a_watched_canvas_shows_what_has_been_added() -> None:
    params = SamplingParams(max_tokens=60, diffusion=growing({"block_length": 24}))
    engine = toy_engine(ScriptedModel(certain({})))
    engine.add(Request(0, prompt_of(8), params, watch=True))
    shown = [update.canvas for _ in range(20) for update in engine.step()]
    assert [len(canvas or ()) for canvas in shown][-1] == 60
    assert {len(canvas or ()) for canvas in shown} == {24, 48, 60}


@pytest.mark.parametrize(
    ("model", "diffusion", "told"),
    [
        (CAUSAL, {"canvas_length": 32}, "block-causal"),
        (BIDIRECTIONAL, {"canvas": "fixed", "canvas_length": 32}, "leave one of them out"),
    ],
)
def test_a_length_that_has_no_meaning_is_refused(
    model: ToyModel, diffusion: dict[str, Any], told: str
) -> None:
    with pytest.raises(InvalidField, match=told) as refused:
        generated(model, prompt_of(5), max_tokens=8, diffusion=diffusion)
    assert refused.value.field == "diffusion.canvas_length"
