"""Speculation saves forwards and changes nothing else."""

from typing import Any

import pytest

from diffray import SamplingParams
from diffray.workers.messages import Request
from tests.helpers.speculating import KINDS, draw_requests, run_all, speculating, texts
from tests.helpers.toy import ToyModel, prompt_of, toy_engine

VERIFY = {"speculation": {"kind": "verify"}, "block_length": 20}
FIXED = {"kind": "fixed", "steps": 40}
SLOW = SamplingParams(max_tokens=40, ignore_eos=True, diffusion={"decoder": FIXED, **VERIFY})


@pytest.mark.parametrize(("count", "seed"), [(6, 1), pytest.param(25, 100, marks=pytest.mark.long)])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.rotate(2)
def test_tokens_and_steps_are_those_without(kind: str, count: int, seed: int) -> None:
    """Alone, and all together in too few pages."""
    model = ToyModel(**KINDS[kind])
    requests = draw_requests(count, seed, model.spec)
    drafted = speculating(requests)
    expected: dict[int, list[tuple[int, int]]] = {}
    before = after = 0
    for plain, request in zip(requests, drafted, strict=True):
        slow, fast = toy_engine(model), toy_engine(model)
        expected |= texts(run_all(slow, [plain]))
        assert texts(run_all(fast, [request])) == {request.uid: expected[request.uid]}, request
        assert fast.kv.num_free == slow.kv.num_free
        drafts, saved = fast.stats().drafts, slow.forwards - fast.forwards
        # The last forward's four may be right behind the end of the text, where they save nothing.
        assert 0 <= saved <= drafts.right <= min(saved + 4, drafts.run)
        before, after = before + slow.forwards, after + fast.forwards
    assert after < before
    crowded = toy_engine(model, num_pages=80)
    assert texts(run_all(crowded, drafted)) == expected


def test_drafts_give_way_to_sequences() -> None:
    """The pages of a draft go to a request that needs them, and waiting ones see no new drafts."""
    engine = toy_engine(ToyModel(), num_pages=1 + 13)  # of 8 positions
    first, second = (Request(uid, prompt_of(10, seed=uid), SLOW) for uid in range(2))
    engine.add(first)
    engine.step()
    engine.step()
    (running,) = engine.running
    assert running.copies and engine.kv.num_free < 7
    engine.add(second)
    engine.step()
    assert len(engine.running) == 1 and not running.copies and engine.waiting


@pytest.mark.parametrize(
    ("overhead", "rows", "drafts"),
    [
        (0, 1, 0),
        (1, 1, 0),  # two windows take nearly twice as long, and a draft may be wrong
        (20, 1, 1),
        (10_000, 1, 4),
        (10_000, 8, 16),  # of all together
        (20, 8, 0),  # many rows make good use of a forward
    ],
)
def test_drafts_are_run_while_they_bring_more_than_they_take(
    overhead: int, rows: int, drafts: int
) -> None:
    engine = toy_engine(ToyModel())
    engine.copies.overhead = overhead
    for uid in range(rows):
        engine.add(Request(uid, prompt_of(10, seed=uid), SLOW))
    engine.step()
    assert sum(engine.copies.running.values()) == drafts


@pytest.mark.parametrize(
    ("decoder", "pays"),
    [
        (FIXED, True),
        ({"kind": "threshold", "threshold": 0.2}, False),
        ({"kind": "threshold", "threshold": 0.03}, False),  # a block takes one step
    ],
)
@pytest.mark.rotate(2)
def test_requests_learn_from_those_before_them(decoder: dict[str, Any], pays: bool) -> None:
    """Drafts that are never right are soon only made, then not even that."""
    engine = toy_engine(ToyModel())
    engine.copies.overhead = 80
    policy: dict[str, Any] = {"decoder": decoder, **VERIFY}
    params = SamplingParams(max_tokens=40, ignore_eos=True, diffusion=policy)
    run, made = [0] * 40, [0] * 40
    for uid in range(40):
        engine.add(Request(uid, prompt_of(10, seed=uid), params))
        while not engine.idle:
            engine.step()
            run[uid] += sum(engine.copies.running.values())
            made[uid] += sum(engine.copies.holders.values())
    assert run[0] > 0 and (sum(run[-10:]) > 0) == pays
    assert pays or sum(made[-20:]) < 20
