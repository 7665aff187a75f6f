"""What a request hears is its own: whatever runs beside it, however it is run, whatever goes wrong.

A mixture has requests of many kinds; a story tells what happens to them.
"""

from collections.abc import Callable, Iterator
from copy import copy
from dataclasses import replace
from functools import cache, partial
from itertools import chain, count, product
from typing import Any, NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from diffray.kernels.formats import Format
from diffray.workers.engine import Engine
from diffray.workers.messages import Request, Resume, Update
from tests.helpers.mixed_requests import (
    BIDIRECTIONAL,
    CAUSAL,
    IN_PIECES,
    MIXED,
    MIXED_CAUSAL,
    PIECES,
    SHIFTED,
    SHIFTED_CAUSAL,
    SUB_BLOCK,
    Policies,
    careful_requests,
    guided_requests,
    infill_requests,
    mixed_requests,
    penalized_requests,
    pinned_requests,
)
from tests.helpers.resuming import Story
from tests.helpers.speculating import draw_requests, speculating
from tests.helpers.toy import ToyModel, toy_engine


class Mixture(NamedTuple):
    """Requests of all policies that go with a model, and what they have more."""

    model: ToyModel
    make: Callable[[Policies], list[Request]] = mixed_requests
    policies: Policies | None = None
    form: Format | None = None  # of K/V in few bits
    beside_plain: bool = False

    def requests(self) -> list[Request]:
        policies = self.policies or (MIXED_CAUSAL if self.model.spec.block_causal else MIXED)
        found = self.make(policies)
        if not self.beside_plain:
            return found
        others = (replace(each, uid=100 + each.uid) for each in found)
        return [*chain.from_iterable(zip(mixed_requests(policies), others, strict=False))]


def ranked_requests(policies: Policies) -> list[Request]:
    """Return the mixture, with the most probable tokens of every other request."""
    ranked = {"logprobs": True, "top_logprobs": 3}
    return [
        replace(each, params=each.params.model_copy(update=ranked if each.uid % 2 else {}))
        for each in mixed_requests(policies)
    ]


def careful(model: ToyModel) -> Mixture:
    return Mixture(model, lambda _: careful_requests(model)[:5], beside_plain=True)


def drafted(model: ToyModel) -> Mixture:
    return Mixture(model, lambda _: speculating(draw_requests(6, 3, model.spec)))


def foreseen(policies: Policies) -> list[Request]:
    """Return the mixture as far as drafts go with it."""
    found = []
    for request in mixed_requests(policies):
        decoder = request.params.diffusion.decoder
        if decoder is not None and decoder.kind in ("threshold", "fixed", "sequential"):
            found.append(request)
    return speculating(found)


GROWING = [policy | {"canvas": "growing", "canvas_length": 9} for policy in MIXED]
GUIDED, PINNED = partial(guided_requests, seed=2), partial(pinned_requests, seed=1)
INT4 = Format("uint4", 8)  # a toy's heads have 8 numbers
MODELS = {"": BIDIRECTIONAL, ", shifted": SHIFTED, ", causal": CAUSAL}
MIXTURES: dict[str, Mixture] = {
    "bidirectional": Mixture(BIDIRECTIONAL),
    "causal": Mixture(CAUSAL),
    "shifted": Mixture(SHIFTED),
    "shifted causal": Mixture(SHIFTED_CAUSAL),
    "sub-blocks": Mixture(SHIFTED_CAUSAL, policies=SUB_BLOCK),
    "sub-blocks, not shifted": Mixture(CAUSAL, policies=SUB_BLOCK),
    "in pieces": Mixture(IN_PIECES, policies=PIECES),
    "in pieces, drafted": Mixture(IN_PIECES, foreseen, PIECES),
    "in pieces, in 4 bits": Mixture(IN_PIECES, policies=PIECES, form=INT4),
    "in pieces, pinned": Mixture(IN_PIECES, PINNED, policies=PIECES),
    "ranked": Mixture(BIDIRECTIONAL, ranked_requests),
    "ranked, causal": Mixture(CAUSAL, ranked_requests),
    "penalized": Mixture(BIDIRECTIONAL, penalized_requests),
    "penalized, causal": Mixture(CAUSAL, penalized_requests),
    "growing": Mixture(BIDIRECTIONAL, policies=GROWING),
    "growing, shifted": Mixture(SHIFTED, policies=GROWING),
    "infill": Mixture(BIDIRECTIONAL, infill_requests),
    "drafted": drafted(BIDIRECTIONAL),
    "drafted, causal": drafted(CAUSAL),
    **{f"guided{name}": Mixture(each, GUIDED, beside_plain=True) for name, each in MODELS.items()},
    **{f"careful{name}": careful(each) for name, each in MODELS.items()},
    **{f"pinned{name}": Mixture(each, PINNED, beside_plain=True) for name, each in MODELS.items()},
    "in bytes": Mixture(BIDIRECTIONAL, form=Format("uint8")),
    "in 4 bits": Mixture(CAUSAL, form=INT4),
    "sub-blocks in 4 bits": Mixture(SHIFTED_CAUSAL, policies=SUB_BLOCK, form=INT4),
}
FIRST = "bidirectional", "causal", "shifted"  # the others have one thing more


@cache
def alone(name: str) -> dict[int, Story]:
    """Return what each of the mixture's requests writes in an engine of its own."""
    mixture = MIXTURES[name]
    found: dict[int, Story] = {}
    for request in mixture.requests():
        engine = toy_engine(mixture.model, form=mixture.form)
        engine.add(request)
        updates = [update for _ in rounds_of(engine) for update in engine.step()]
        found[request.uid] = Story.of(updates, request.uid)
    return found


def rounds_of(engine: Engine, most: int = 5000) -> Iterator[int]:
    for number in range(most):
        if engine.idle:
            return
        yield number
    raise AssertionError("the engine did not finish")


class Told:
    """Runs a mixture as a story tells, and notes what each request hears."""

    def __init__(self, name: str, interrupts: tuple[int, ...] = (), **options: Any) -> None:
        self.name, self.mixture, self.options = name, MIXTURES[name], options
        self.left = self.mixture.requests()
        self.asked: dict[int, Request] = {}
        self.heard: dict[int, list[Update]] = {}
        self.cancelled: set[int] = set()
        self.model, forward, calls = copy(self.mixture.model), self.mixture.model.forward, count(1)

        def interrupted(*args: Any) -> Tensor:
            if next(calls) in interrupts:
                raise KeyboardInterrupt
            return forward(*args)

        self.model.forward = interrupted  # type: ignore[method-assign, assignment]
        self.lose()

    def add(self, number: int) -> None:
        for request in self.left[:number]:
            self.asked[request.uid] = request
            self.engine.add(request)
        del self.left[:number]

    def step(self, steps: int) -> None:
        try:
            updates = self.engine.step(steps)
        except KeyboardInterrupt:
            return
        for update in updates:
            assert update.uid not in self.cancelled
            self.heard.setdefault(update.uid, []).append(update)

    def preempt(self, number: int) -> None:
        """Preempt so many of those that run."""
        for sequence in self.engine.running[:number]:
            self.engine.preempt(sequence.uid)

    def cancel(self, number: int) -> None:
        """Cancel one of those that were added."""
        if number < len(self.asked):
            uid = [*self.asked][number]
            self.engine.cancel(uid)
            self.cancelled.add(uid)

    def lose(self, _: int = 0) -> None:
        """Go on in another engine, which learns of each request what was heard of it."""
        form, options = self.mixture.form, {"num_pages": 1000} | self.options
        self.engine = toy_engine(self.model, form=form, **options)
        self.free = self.engine.kv.num_free
        for uid in self.asked.keys() - self.cancelled:
            heard = self.heard.get(uid, [])
            if not heard or not heard[-1].finish_reason:
                self.engine.add(replace(self.asked[uid], resume=Resume.after(heard)))

    def tell(self, story: list[tuple[str, int]]) -> None:
        steps = max([number for kind, number in story if kind == "step"], default=1)
        for kind, number in story:
            getattr(self, kind)(number)
        self.add(99)
        for _ in rounds_of(self.engine):
            self.step(steps)
        expected = alone(self.name)
        assert self.heard.keys() >= expected.keys() - self.cancelled
        for uid in expected.keys() - self.cancelled:
            found = Story.of(self.heard[uid], uid)
            assert found.facts == expected[uid].facts, self.asked[uid]
            assert found.numbers == pytest.approx(expected[uid].numbers, abs=1e-6)
        assert self.engine.kv.num_free == self.free
        assert self.engine.slots.num_free == self.engine.slots.num_slots


Actions = list[tuple[str, int]]
STORIES: dict[str, tuple[Actions, dict[str, Any]]] = {
    "together": ([], {"num_slots": 30}),
    "long rounds": ([("add", 99), ("step", 5)], {}),
    "late": ([("add", 1), *[("step", 1)] * 3] * 12, {}),
    "cancelled": ([("add", 99), ("step", 4), ("cancel", 1), ("cancel", 3)], {}),
    "preempted": ([("add", 99), *[("step", 1)] * 7, ("preempt", 99)], {}),
    "lost": ([("add", 99), *[("step", 1)] * 4, ("lose", 0), *[("step", 2)] * 3, ("lose", 0)], {}),
    "interrupted": ([("add", 99), ("step", 5)], {"interrupts": (3, 9, 17, 28, 44)}),
    "scarce": ([("add", 99), ("step", 3)], {"num_pages": 110, "page_size": 5}),
}


@pytest.mark.parametrize("story", STORIES)
@pytest.mark.parametrize("mixture", FIRST)
@pytest.mark.rotate(12)
def test_tokens_are_those_of_each_request_alone(mixture: str, story: str) -> None:
    actions, options = STORIES[story]
    told = Told(mixture, **options)
    told.tell(actions)
    if story in ("preempted", "interrupted") or (story, mixture) == ("scarce", "causal"):
        assert told.engine.preemptions > 0


@pytest.mark.parametrize("ahead", [1, 5])
@pytest.mark.parametrize("mixture", FIRST)
@pytest.mark.rotate(2)
def test_rows_that_are_done_early_in_a_round_wait(
    mixture: str, ahead: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A round looks at results at every step, or only at its end."""
    monkeypatch.setattr("diffray.workers.engine.steps_ahead", lambda _: ahead)
    for story in ("long rounds", "interrupted"):
        actions, options = STORIES[story]
        Told(mixture, **options).tell(actions)


OTHERS = product([name for name in MIXTURES if name not in FIRST], STORIES)


@pytest.mark.parametrize(
    ("mixture", "story"),
    [pytest.param(*each, marks=[pytest.mark.long] * (n % 3 > 0)) for n, each in enumerate(OTHERS)],
)
@pytest.mark.rotate(12)
def test_with_one_thing_more_they_are_too(mixture: str, story: str) -> None:
    actions, options = STORIES[story]
    Told(mixture, **options).tell(actions)


ACTIONS = st.one_of(
    st.tuples(st.just("add"), st.integers(1, 6)),
    st.tuples(st.just("step"), st.integers(1, 5)),
    st.tuples(st.just("step"), st.integers(1, 2)),
    st.tuples(st.sampled_from(["preempt", "cancel"]), st.integers(0, 12)),
    st.tuples(st.just("lose"), st.just(0)),
)


@pytest.mark.long
@settings(max_examples=25, deadline=None)
@given(
    st.sampled_from([*MIXTURES]),
    st.lists(ACTIONS, min_size=4, max_size=20),
    st.sampled_from([90, 200, 1000]),
    st.lists(st.integers(1, 40), max_size=4).map(tuple),
)
def test_whatever_happens_tokens_are_those_of_each_request_alone(
    mixture: str, story: Actions, pages: int, interrupts: tuple[int, ...]
) -> None:
    Told(mixture, interrupts, num_pages=pages).tell(story)


@pytest.mark.parametrize("name", ["penalized", "careful", "in bytes", "in 4 bits", "infill"])
def test_the_one_thing_more_shows(name: str) -> None:
    """Else the stories would tell of the plain mixture again."""
    found, plain = alone(name), alone(FIRST[MIXTURES[name].model is CAUSAL])
    others = {uid: found.get(100 + uid, found.get(uid, told)) for uid, told in plain.items()}
    changed = [others[uid].facts["ids"] != told.facts["ids"] for uid, told in plain.items()]
    assert sum(changed) > 3
