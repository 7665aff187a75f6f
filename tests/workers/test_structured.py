"""Guided answers in the engine: accepted in every order of tokens, and no other answer changed."""

from collections.abc import Sequence as Items
from dataclasses import replace
from typing import Any

import pytest

from diffray.components.config import InvalidField
from diffray.components.grammar.automaton import Automaton
from diffray.components.params import SamplingParams
from diffray.workers.messages import Request
from tests.helpers.mixed_requests import (
    ALL_THREE,
    BIDIRECTIONAL,
    CAUSAL,
    SHIFTED,
    Policies,
    alone,
    careful_requests,
    grammar,
    guided_requests,
    sequences_of,
)
from tests.helpers.toy import EOS, MASK, VOCAB, ToyModel, prompt_of, run, toy_engine


def accepted(request: Request, ids: Items[int]) -> bool:
    automaton = Automaton.from_bytes(request.grammar)
    return automaton.follow(0, ids) == automaton.end and ids[-1] == EOS and MASK not in ids


@pytest.mark.parametrize("seeds", [range(2), pytest.param(range(2, 4), marks=pytest.mark.long)])
@pytest.mark.parametrize("steps", [1, 4])
@ALL_THREE
@pytest.mark.rotate(1)
def test_every_answer_is_accepted_whatever_the_policy(
    model: ToyModel, policies: Policies, steps: int, seeds: range
) -> None:
    for seed in seeds:
        requests = guided_requests(policies, seed)
        found = run(toy_engine(model, num_slots=len(requests)), requests, steps)
        for request in requests:
            assert accepted(request, found[request.uid]), (seed, request.uid)


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


def has_any(ids: Items[int], sequences: Items[tuple[int, ...]]) -> bool:
    return any(
        tuple(ids[at : at + len(each)]) == each for each in sequences for at in range(len(ids))
    )


@pytest.mark.parametrize("model", [BIDIRECTIONAL, SHIFTED, CAUSAL])
def test_what_must_not_be_written_is_not(model: ToyModel) -> None:
    careful = careful_requests(model)
    found = run(toy_engine(model), careful, 3)
    for request in careful:
        ids, avoided = found[request.uid], request.params.bad_token_sequences
        assert has_any(alone(model)[request.uid], avoided)
        assert len(ids) == request.params.max_tokens  # it need not come to an end
        assert not has_any(ids, avoided)


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
    avoided = (3, 3), (3, 4), (4, 4, 4)
    few: dict[str, Any] = {"allowed_token_ids": [3, 4, 5], "bad_token_sequences": avoided}
    params = SamplingParams(max_tokens=30, min_tokens=30, **few)
    ids = run(engine, [Request(0, prompt_of(5), params)])[0]
    assert not has_any(ids, avoided) and {*ids} <= {3, 4, 5, EOS}
    nothing: dict[str, Any] = {"allowed_token_ids": [3, 4]}
    nothing["bad_token_sequences"] = [[3], [4, 3], [4, 4]]
    for endless in ({"ignore_eos": True}, {"min_tokens": 9}):
        with pytest.raises(InvalidField, match="leave no text of the allowed tokens"):
            engine.add(Request(0, prompt_of(5), SamplingParams(**nothing | endless)))
    engine.check(Request(0, prompt_of(5), SamplingParams(**nothing)))
