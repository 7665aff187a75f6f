"""Pinned canvases in the engine: literals stay, slots are filled, and no other answer changes."""

from dataclasses import replace

import pytest

from diffray.components.config import InvalidField
from diffray.components.grammar.template import Template
from diffray.components.params import SamplingParams
from diffray.workers.messages import Request, Resume, Update
from tests.helpers.mixed_requests import (
    ALL_THREE,
    BIDIRECTIONAL,
    CAUSAL,
    SHIFTED,
    Policies,
    canvas_of,
    pinned,
    pinned_requests,
)
from tests.helpers.random_canvases import fits
from tests.helpers.resuming import updates_of
from tests.helpers.toy import ToyModel, prompt_of, run, toy_engine


@pytest.mark.parametrize("steps", [1, 4])
@ALL_THREE
def test_every_answer_fits_its_canvas_whatever_the_policy(
    model: ToyModel, policies: Policies, steps: int
) -> None:
    for seed in range(3):
        requests = pinned_requests(policies, seed)
        found = run(toy_engine(model, num_slots=len(requests)), requests, steps)
        for request in requests:
            template = Template.from_bytes(request.grammar)
            assert fits(template, found[request.uid]), (seed, request.uid)


def whole_answer(model: ToyModel, request: Request) -> Update:
    """Return the only update: an answer is reported as a whole."""
    (update,) = updates_of(toy_engine(model), [request], 1)
    assert update.finish_reason == "stop"
    return update


@pytest.mark.parametrize("model", [BIDIRECTIONAL, SHIFTED, CAUSAL])
def test_an_answer_in_blocks_can_be_resumed_before_it_is_reported(model: ToyModel) -> None:
    """Its first blocks may be literals, which no step decides; it starts over."""
    policy = {"block_length": 4}
    for number in range(24):
        params = SamplingParams(diffusion=policy, logprobs=True, temperature=number % 2)
        request = pinned(Request(0, prompt_of(5), params), number)
        whole = whole_answer(model, request)
        again = whole_answer(model, replace(request, resume=Resume((), forwards=1)))
        assert again.ids == whole.ids and again.fields == whole.fields
        assert again.logprobs == pytest.approx(whole.logprobs)


def test_rankings_are_those_of_the_request_alone_beside_a_longer_block() -> None:
    params = SamplingParams(logprobs=True, top_logprobs=2, max_tokens=90)
    long = Request(1, prompt_of(5), SamplingParams(max_tokens=64, diffusion={"block_length": 64}))
    for number in range(6):
        request = pinned(Request(0, prompt_of(5), params), number)
        alone = whole_answer(BIDIRECTIONAL, request)
        beside = updates_of(toy_engine(BIDIRECTIONAL), [request, long], 1)
        (found,) = (update for update in beside if update.uid == 0)
        assert found.ids == alone.ids and len(found.top_logprobs) == len(found.ids)
        assert [[token for token, _ in top] for top in found.top_logprobs] == [
            [token for token, _ in top] for top in alone.top_logprobs
        ]


def test_a_choice_s_options_share_all_probability() -> None:
    several = 0
    for model in (BIDIRECTIONAL, CAUSAL):
        for number in range(30):
            plain = Request(0, prompt_of(5), SamplingParams(logprobs=True, max_tokens=90))
            update = whole_answer(model, pinned(plain, number))
            canvas = Template.from_bytes(canvas_of(number))
            assert update.fields.keys() == {slot.path for slot in canvas.slots}
            assert len(update.logprobs) == len(update.ids) == len(update.steps)
            for slot in canvas.slots:
                likely, options = update.fields[slot.path]
                assert 0 <= likely <= 1
                if options:
                    assert sum(options.values()) == pytest.approx(1)
                    several += len(set(slot.tokens)) > 1
    assert several > 10


def test_tokens_that_are_not_allowed_are_in_no_slot() -> None:
    for number in range(20):
        canvas = Template.from_bytes(canvas_of(number))
        literals = set(canvas.cells)
        banned = frozenset(token for token in range(0, 60, 3) if token not in literals)
        plain = Request(0, prompt_of(5), SamplingParams(bad_token_ids=sorted(banned)))
        try:
            update = whole_answer(BIDIRECTIONAL, pinned(plain, number))
        except InvalidField as error:
            assert "the allowed tokens leave no value" in str(error)
        else:
            assert fits(canvas, update.ids, banned)


def with_a_long_end(request: Request) -> Request:
    """Return the request with more literals than a block has positions after its last slot."""
    canvas = Template.from_bytes(request.grammar)
    cells = (*canvas.cells[:-1], *[3] * 40, canvas.end_id)
    params = request.params.model_copy(update={"max_tokens": len(cells)})
    return replace(request, params=params, grammar=replace(canvas, cells=cells).to_bytes())


@ALL_THREE
def test_penalties_go_with_it_in_a_batch_as_alone(model: ToyModel, policies: Policies) -> None:
    own = {"frequency_penalty": 2.0, "repetition_penalty": 1.5, "min_p": 0.1}
    plain = [with_a_long_end(request) for request in pinned_requests(policies, seed=3)]
    requests = [replace(r, params=r.params.model_copy(update=own)) for r in plain]
    found = run(toy_engine(model, num_slots=len(requests), num_pages=1000), requests)
    changed = 0
    for request, other in zip(requests, plain, strict=True):
        assert fits(Template.from_bytes(request.grammar), found[request.uid])
        assert found[request.uid] == run(toy_engine(model), [request])[request.uid]
        changed += found[request.uid] != run(toy_engine(model), [other])[request.uid]
    assert changed


def test_presence_and_frequency_count_values_and_not_literals() -> None:
    """With one slot for one token nothing is written before it, so nothing is taken."""
    alone = 0
    for number in range(60):
        canvas = Template.from_bytes(canvas_of(number))
        if sum(cell < 0 for cell in canvas.cells) != 1:
            continue
        alone += 1
        for model in (BIDIRECTIONAL, CAUSAL):
            plain = pinned(Request(0, prompt_of(5), SamplingParams()), number)
            update = {"presence_penalty": 2.0, "frequency_penalty": -2.0, "logprobs": True}
            found, other = (
                whole_answer(model, replace(plain, params=plain.params.model_copy(update=each)))
                for each in (update, {"logprobs": True})
            )
            assert found.ids == other.ids and found.logprobs == pytest.approx(other.logprobs)
    assert alone


ONE_STEP = {"steps": 1}


@pytest.mark.parametrize("model", [BIDIRECTIONAL, SHIFTED, CAUSAL])
@pytest.mark.parametrize(
    ("decoder", "most"),
    [
        (None, 2),
        ({"kind": "threshold", "threshold": 0}, 2),
        ({"kind": "schedule"} | ONE_STEP, 2),
        ({"kind": "fixed"} | ONE_STEP, 2),
        ({"kind": "whole_slots", "threshold": 0}, 1),
    ],
)
def test_one_forward_measures_and_one_fills(
    model: ToyModel, decoder: dict[str, object] | None, most: int
) -> None:
    """A block-causal model too, although it attends to shorter blocks."""
    taken = []
    for number in range(24):
        params = SamplingParams(temperature=number % 2, logprobs=True)
        own = {} if decoder is None else {"decoder": decoder}
        request = pinned(Request(0, prompt_of(5 + number % 20), params), number, **own)
        update = whole_answer(model, request)
        assert fits(Template.from_bytes(request.grammar), update.ids)
        assert update.forwards <= most, number
        assert len(update.logprobs) == len(update.ids) and max(update.steps) < update.forwards
        taken.append((toy_engine(model).check(request).may_shrink, update.forwards))
    assert {forwards for measured, forwards in taken if measured} >= {1, most}
    if decoder and "threshold" in decoder:
        assert all(forwards == 1 for measured, forwards in taken if not measured)
