"""What an engine reports besides tokens: canvases, counts, a digest; and whom it admits first."""

from collections import defaultdict
from dataclasses import replace
from itertools import count
from types import SimpleNamespace
from typing import Any

import pytest

from diffray.components.mesh import Mesh
from diffray.components.params import SamplingParams
from diffray.workers import rank
from diffray.workers.digest import digest
from diffray.workers.messages import Reply, Request, Round
from tests.helpers.mixed_requests import BIDIRECTIONAL, BOTH, MIXED, Policies, mixed_requests
from tests.helpers.toy import ScriptedModel, ToyModel, drain, prompt_of, toy_engine


@pytest.mark.slow
@pytest.mark.parametrize("steps", [1, 3])
@BOTH
@pytest.mark.rotate(2)
def test_watched_requests_show_the_canvas_of_every_round(
    model: ToyModel, policies: Policies, steps: int
) -> None:
    requests = mixed_requests(policies)
    engine = toy_engine(model)
    for request in requests:
        engine.add(replace(request, watch=request.uid % 2 == 0))
    told: dict[int, list[int]] = defaultdict(list)
    while not engine.idle:
        before = {sequence.uid for sequence in engine.running}
        updates = {update.uid: update for update in engine.step(steps)}
        assert {uid for uid in before if uid % 2 == 0} <= set(updates)
        for uid, update in updates.items():
            told[uid] += update.ids
            if uid % 2:
                assert update.canvas is None
            elif not update.finish_reason:
                (sequence,) = [s for s in engine.running if s.uid == uid]
                place = sequence.slot, slice(sequence.canvas.prompt_len, sequence.canvas.limit)
                masked_N, ids_N = engine.slots.masked_SN[place], engine.slots.ids_SN[place]
                shown = ids_N.masked_fill(masked_N, -1).tolist()
                assert update.canvas == [None if token < 0 else token for token in shown]
                assert update.canvas[: len(told[uid])] == told[uid]
            else:
                assert update.canvas == told[uid]
                assert len(told[uid]) == requests[uid].params.max_tokens


def test_only_waits_while_there_is_work_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """A round that is fresh follows none: until it came, there was nothing to do."""
    ticks, fresh = count(step=0.25), (True, False, True, False)
    orders: list[Round[Any]] = [Round(n, [], [], 1, fresh=f) for n, f in enumerate(fresh)]
    replies: list[Reply] = []
    link: Any = SimpleNamespace(receive=iter([*orders, None]).__next__, send=replies.append)
    monkeypatch.setattr(rank, "time", SimpleNamespace(perf_counter=ticks.__next__))
    rank.Rank(toy_engine(ToyModel()), Mesh(), link).serve()
    assert [reply.waited for reply in replies] == [0.0, 0.25, 0.25, 0.5]
    assert [reply.worked for reply in replies] == [0.0, 0.25, 0.5, 0.75]  # before each


def test_canvas_of_a_text_that_ended_shows_the_masks_that_are_left() -> None:
    model = ScriptedModel(lambda position: {63 if position == 8 else 1: 20.0})
    params = SamplingParams(max_tokens=20, diffusion={"block_length": 8})
    engine = toy_engine(model)
    engine.add(Request(0, prompt_of(6), params, watch=True))
    (update,) = engine.step()
    assert update.finish_reason == "stop"
    assert update.canvas == [1, 1, 63, 1, 1, 1, 1, 1] + [None] * 12


def test_digest_tells_engines_apart_that_differ_in_anything() -> None:
    def digests(requests: list[Request]) -> list[int]:
        engine, found = toy_engine(BIDIRECTIONAL), []
        for request in requests:
            engine.add(request)
        for _ in range(4):
            engine.step()
            found.append(digest(engine))
        return found

    requests = mixed_requests(MIXED)
    first = digests(requests)
    assert first == digests(requests)
    others = [*first, *digests(requests[1:]), *digests(requests[::-1])]
    assert len({*others}) == len(others) and all(0 <= each < 2**63 for each in others)

    engine = toy_engine(BIDIRECTIONAL)
    engine.add(requests[0])
    engine.step()
    slot, seen = engine.running[0].slot, [digest(engine)]
    assert digest(engine) == seen[0]
    engine.slots.ids_SN[slot, 3] += 1
    seen.append(digest(engine))
    engine.slots.masked_SN[slot, 20] ^= True
    seen.append(digest(engine))
    engine.kv.allocate(1)
    assert len({*seen, digest(engine)}) == 4


def test_stats_count() -> None:
    model = ScriptedModel(lambda position: {position % 60: 3.0})
    engine = toy_engine(model, num_slots=2, num_pages=40)
    fixed = {"decoder": {"kind": "fixed", "steps": 16}}
    params = SamplingParams(max_tokens=16, ignore_eos=True, diffusion=fixed)
    for uid in range(3):
        engine.add(Request(uid, prompt_of(8), params))
    stats = engine.stats()
    assert (stats.running, stats.waiting, stats.forwards, stats.tokens) == (0, 3, 0, 0)
    assert stats.free_pages == stats.num_pages == 39
    engine.step()
    engine.step()
    stats = engine.stats()
    assert (stats.running, stats.waiting, stats.forwards) == (2, 1, 2)
    assert stats.free_pages == 39 - 2 * 3
    engine.preempt(1)
    drain(engine)
    stats = engine.stats()
    assert (stats.running, stats.waiting, stats.preemptions) == (0, 0, 1)
    assert (stats.tokens, stats.forwards) == (3 * 16, model.forwards)
    assert stats.free_pages == 39


@pytest.mark.parametrize("num_pages", [18, 22, 40])
def test_order_of_arrival_survives_preemption(num_pages: int) -> None:
    """A sequence that needs most pages at once is not passed, nor is a preempted one."""
    engine = toy_engine(ToyModel(block_causal=True), num_pages=num_pages)
    for uid in range(7):
        prompt, most = (100, 36) if uid == 3 else (8, 56)
        params = SamplingParams(max_tokens=most, ignore_eos=True, diffusion={"block_length": 8})
        engine.add(Request(uid, prompt_of(prompt, uid), params))
    begun: list[int] = []
    while not engine.idle:
        engine.step()
        begun += [s.uid for s in engine.running if s.uid not in begun]
        waiting = [s.uid for s in engine.waiting]
        assert waiting == sorted(waiting)
    assert begun == sorted(begun)
