"""Guided answers in the engine: accepted in every order of tokens, and no other answer changed."""

import random
from collections.abc import Sequence as Items
from dataclasses import replace
from functools import cache
from typing import Any

import pytest

from diffray.components.config import InvalidField
from diffray.components.grammar.automaton import Automaton
from diffray.components.params import SamplingKeywords, SamplingParams
from diffray.workers.messages import Request, Resume
from tests.helpers.mixed_requests import (
    BIDIRECTIONAL,
    CAUSAL,
    MIXED,
    MIXED_CAUSAL,
    SHIFTED,
    alone,
    mixed_requests,
)
from tests.helpers.random_grammars import random_automaton
from tests.helpers.toy import EOS, MASK, VOCAB, ToyModel, prompt_of, run, toy_engine

MODELS = [
    pytest.param(BIDIRECTIONAL, MIXED, id="bidirectional"),
    pytest.param(SHIFTED, MIXED, id="shifted"),
    pytest.param(CAUSAL, MIXED_CAUSAL, id="causal"),
]
FEW = [MODELS[0], pytest.param(SHIFTED, MIXED, id="shifted", marks=pytest.mark.long), MODELS[2]]


@cache
def grammar(number: int) -> tuple[Automaton, bytes]:
    found = random_automaton(random.Random(number), VOCAB, (EOS,))
    return found, found.to_bytes()


def guided_requests(policies: Items[dict[str, object]], seed: int) -> list[Request]:
    """Return the mixture with an automaton each, with just enough tokens or with more."""
    found = []
    for request in mixed_requests(list(policies)):
        automaton, data = grammar(100 * seed + request.uid)
        most = automaton.shortest + (0, 3, 40)[(request.uid + seed) % 3]
        update = {"max_tokens": max(most, 1), "ignore_eos": False}
        params = request.params.model_copy(update=update)
        found.append(replace(request, params=params, grammar=data))
    return found


@cache
def guided_alone(model: ToyModel) -> dict[int, list[int]]:
    """Return what each of a mixture writes in an engine of its own."""
    requests = guided_requests(MIXED_CAUSAL if model.spec.block_causal else MIXED, seed=2)
    return {each.uid: run(toy_engine(model), [each])[each.uid] for each in requests}


def accepted(request: Request, ids: Items[int]) -> bool:
    automaton = Automaton.from_bytes(request.grammar)
    return automaton.follow(0, ids) == automaton.end and ids[-1] == EOS and MASK not in ids


@pytest.mark.parametrize("seeds", [range(2), pytest.param(range(2, 4), marks=pytest.mark.long)])
@pytest.mark.parametrize("steps", [1, 4])
@pytest.mark.parametrize(("model", "policies"), MODELS)
@pytest.mark.rotate(2)
def test_every_answer_is_accepted_whatever_the_policy(
    model: ToyModel, policies: list[dict[str, object]], steps: int, seeds: range
) -> None:
    for seed in seeds:
        requests = guided_requests(policies, seed)
        found = run(toy_engine(model, num_slots=len(requests)), requests, steps)
        for request in requests:
            assert accepted(request, found[request.uid]), (seed, request.uid)


@pytest.mark.parametrize(("model", "policies"), MODELS)
def test_in_a_batch_as_alone_and_the_others_are_unchanged(
    model: ToyModel, policies: list[dict[str, object]]
) -> None:
    plain = [replace(r, uid=100 + r.uid) for r in mixed_requests(policies)]
    guided = guided_requests(policies, seed=1)
    mixed = [each for pair in zip(plain, guided, strict=True) for each in pair]
    found = run(toy_engine(model, num_slots=len(mixed), num_pages=1000), mixed)
    assert {r.uid: found[100 + r.uid] for r in guided} == alone(model)
    for request in guided:
        assert found[request.uid] == run(toy_engine(model), [request])[request.uid]


@pytest.mark.parametrize("rounds", [1, 4, 9])
@pytest.mark.parametrize(("model", "policies"), FEW)
@pytest.mark.rotate(2)
def test_it_goes_on_after_its_engine_is_lost(
    model: ToyModel, policies: list[dict[str, object]], rounds: int
) -> None:
    for request in guided_requests(policies, seed=2):
        engine = toy_engine(model)
        engine.add(request)
        updates = [update for _ in range(rounds) for update in engine.step()]
        if updates and updates[-1].finish_reason:
            continue
        resumed = replace(request, resume=Resume.after(updates))
        rest = run(toy_engine(model), [resumed])[request.uid]
        whole = [t for update in updates for t in update.ids] + rest
        assert whole == guided_alone(model)[request.uid]


def test_bans_and_biases_count() -> None:
    automaton, data = grammar(3)
    engine, requests = toy_engine(BIDIRECTIONAL, num_slots=16), []
    for token in range(VOCAB):
        banned = automaton.without(frozenset({token}))
        params = SamplingParams(max_tokens=16, bad_token_ids=[token])
        request = Request(token, prompt_of(5), params, grammar=data)
        if banned.shortest > 16:
            with pytest.raises(InvalidField, match=r"leave no text|takes"):
                engine.add(request)
        else:
            requests.append(request)
    found = run(engine, requests)
    for request in requests:
        ids = found[request.uid]
        assert accepted(request, ids) and request.uid not in ids


def test_what_cannot_be_fulfilled_is_refused() -> None:
    automaton = next(grammar(n)[0] for n in range(99) if grammar(n)[0].shortest > 2)
    engine = toy_engine(BIDIRECTIONAL)
    wrong: list[tuple[SamplingKeywords, str]] = [
        ({"max_tokens": automaton.shortest - 1}, f"takes {automaton.shortest} tokens"),
        ({"max_tokens": 30, "ignore_eos": True}, "ignore_eos does not go with"),
        ({"max_tokens": 30, "min_tokens": 3}, "min_tokens does not go with"),
    ]
    for given, message in wrong:
        request = Request(0, prompt_of(5), SamplingParams(**given), grammar=automaton.to_bytes())
        with pytest.raises(InvalidField, match=message):
            engine.add(request)


def sequences_of(ids: Items[int]) -> tuple[tuple[int, ...], ...]:
    """Return some of what an answer has, of two and of three tokens."""
    pairs = [tuple(ids[at : at + 2]) for at in range(0, len(ids) - 2, 5)]
    return (*pairs, *(tuple(ids[at : at + 3]) for at in range(2, len(ids) - 3, 7)))


def has_any(ids: Items[int], sequences: Items[tuple[int, ...]]) -> bool:
    return any(
        tuple(ids[at : at + len(each)]) == each for each in sequences for at in range(len(ids))
    )


def careful_requests(model: ToyModel) -> list[Request]:
    """Return the model's mixture, which must not write some of what it writes else."""
    found = []
    for request in mixed_requests(MIXED_CAUSAL if model.spec.block_causal else MIXED):
        sequences = sequences_of(alone(model)[request.uid])
        assert has_any(alone(model)[request.uid], sequences)
        params = request.params.model_copy(update={"bad_token_sequences": sequences})
        found.append(replace(request, uid=100 + request.uid, params=params))
    return found


@pytest.mark.parametrize(("model", "policies"), FEW)
def test_what_must_not_be_written_is_not_and_nothing_else_changes(
    model: ToyModel, policies: list[dict[str, object]]
) -> None:
    plain, careful, free = mixed_requests(policies), careful_requests(model), alone(model)
    mixed = [each for pair in zip(plain, careful, strict=True) for each in pair]
    found = run(toy_engine(model, num_slots=len(mixed), num_pages=1000), mixed, 3)
    for request, own in zip(plain, careful, strict=True):
        assert found[request.uid] == free[request.uid]
        ids = found[own.uid]
        assert len(ids) == own.params.max_tokens  # it need not come to an end
        assert not has_any(ids, own.params.bad_token_sequences)
        assert ids == run(toy_engine(model), [own])[own.uid]


@pytest.mark.long
@pytest.mark.parametrize("model", [BIDIRECTIONAL, SHIFTED, CAUSAL])
def test_what_must_not_be_written_is_remembered_when_an_engine_is_lost(model: ToyModel) -> None:
    for own in careful_requests(model):
        engine = toy_engine(model)
        engine.add(own)
        updates = [update for _ in range(3) for update in engine.step()]
        if updates and updates[-1].finish_reason:
            continue
        rest = run(toy_engine(model), [replace(own, resume=Resume.after(updates))])[own.uid]
        begun = [token for update in updates for token in update.ids]
        assert begun + rest == run(toy_engine(model), [own])[own.uid]


def test_what_must_not_be_written_goes_with_a_grammar_and_with_what_is_allowed() -> None:
    engine, kept = toy_engine(BIDIRECTIONAL), 0
    for number in range(12):
        automaton, data = grammar(number)
        params = SamplingParams(max_tokens=automaton.shortest + 9)
        request = Request(0, prompt_of(5), params, grammar=data)
        ids = run(engine, [request])[0]
        avoided = tuple(pair for pair in sequences_of((*ids, *ids)) if EOS not in pair) or ((1, 2),)
        update = {"bad_token_sequences": avoided}
        careful = replace(request, params=params.model_copy(update=update))
        try:
            ids = run(engine, [careful])[0]
        except InvalidField as refusal:
            assert "leave no text" in str(refusal) or "shortest" in str(refusal)
            continue
        assert accepted(request, ids) and not has_any(ids, avoided)
        kept += 1
    assert kept > 6
    few: dict[str, Any] = {
        "allowed_token_ids": [3, 4, 5],
        "bad_token_sequences": [[3, 3], [3, 4], [4, 4, 4]],
    }
    for min_tokens in (0, 30):
        params = SamplingParams(max_tokens=30, min_tokens=min_tokens, **few)
        ids = run(engine, [Request(0, prompt_of(5), params)])[0]
        assert not has_any(ids, ((3, 3), (3, 4), (4, 4, 4))) and {*ids} <= {3, 4, 5, EOS}
    nothing: dict[str, Any] = {
        "allowed_token_ids": [3, 4],
        "bad_token_sequences": [[3], [4, 3], [4, 4]],
    }
    endless: list[dict[str, Any]] = [{"ignore_eos": True}, {"min_tokens": 9}]
    for more in endless:
        with pytest.raises(InvalidField, match="leave no text of the allowed tokens"):
            engine.add(Request(0, prompt_of(5), SamplingParams(**nothing, **more)))
    engine.check(Request(0, prompt_of(5), SamplingParams(**nothing)))
    with pytest.raises(InvalidField, match="not in the vocabulary"):
        engine.add(Request(0, (1,), SamplingParams(bad_token_sequences=[[3, VOCAB]])))
