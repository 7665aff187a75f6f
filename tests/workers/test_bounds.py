"""What a request may cost: a number of steps that its canvas bounds, whatever its policy says."""

from collections import defaultdict
from collections.abc import Iterator
from itertools import product
from typing import Any, get_args

import pytest
import torch
from torch import Tensor

from diffray.components.config import LARGEST, Config
from diffray.components.params import SamplingParams
from diffray.components.policy import AnyCache, AnyDecoder, AnyIteration, DiffusionParams, Policy
from diffray.workers.messages import Request
from tests.helpers.toy import MASK, ScriptedModel, last_update, prompt_of, toy_engine, toy_spec

TOKENS = 20


class Undecided(ScriptedModel):
    """A model that is sure of another token at every forward, so that editing never settles."""

    def __init__(self, block_causal: bool) -> None:
        super().__init__(lambda position: {})
        self.spec = toy_spec(block_causal, num_layers=1, hidden_size=1)

    def head(self, hidden_RH: Tensor) -> Tensor:
        sure_R = hidden_RH.squeeze(1).long() % 7 + 8 * (self.forwards % 2)
        return 30.0 * torch.nn.functional.one_hot(sure_R, self.spec.vocab_size).double()

    def expected_embedding(self, weights_RV: Tensor) -> Tensor:
        return weights_RV.new_ones(len(weights_RV), 1)


def kinds(union: Any) -> tuple[Any, ...]:
    return get_args(get_args(union)[0])


def extremes(kind: type[Config]) -> Iterator[dict[str, Any]]:
    """Yield the configurations whose numbers are the largest, or the smallest, that are allowed."""
    numbers = {
        name: field
        for name, field in kind.model_fields.items()
        if field.annotation in (int, float, int | None)
    }
    plain: dict[str, Any] = {"kind": kind.model_fields["kind"].default}
    ends: list[dict[str, Any]] = [{}, {}]
    for name, field in numbers.items():
        said = {type(bound).__name__: bound for bound in field.metadata}
        tiny = 1e-300 if field.annotation is float else 1
        low = said["Ge"].ge if "Ge" in said else said["Gt"].gt + tiny if "Gt" in said else -LARGEST
        ends[0][name] = low
        ends[1][name] = said["Le"].le if "Le" in said else LARGEST
    yield from (plain | end for end in ends)
    yield from (plain | {name: end[name]} for end in ends for name in numbers)


def policies(block_causal: bool) -> Iterator[dict[str, Any]]:
    """Yield all kinds that go together: at both ends, and each number alone at one."""
    parts = {"decoder": AnyDecoder, "iteration": AnyIteration, "cache": AnyCache}
    seen: set[type[Config]] = set()
    for combination in product(*map(kinds, parts.values())):
        ends = [list(extremes(kind)) for kind in combination]
        low, high = ({p: e[end] for p, e in zip(parts, ends, strict=True)} for end in (0, 1))
        try:
            Policy.resolve(DiffusionParams.model_validate(low), toy_spec(block_causal))
        except ValueError:
            continue  # such parts do not go together
        yield from (low, high)
        for part, kind, alone in zip(parts, combination, ends, strict=True):
            if kind not in seen:
                yield from (low | {part: extreme} for extreme in alone)
        seen |= {*combination}


@pytest.mark.parametrize("block_causal", [False, True], ids=["bi", "causal"])
@pytest.mark.parametrize("length", [2, 8, 64])
@pytest.mark.rotate(1)
def test_a_canvas_bounds_the_steps_of_every_policy(block_causal: bool, length: int) -> None:
    """All kinds of all parts are found by themselves, so a new decoder is among them."""
    asked = list(policies(block_causal))
    engine = toy_engine(Undecided(block_causal), num_slots=len(asked), num_pages=8000)
    for uid, policy in enumerate(asked):
        params = SamplingParams(
            max_tokens=TOKENS,
            ignore_eos=True,
            temperature=(0, 1.0)[uid % 2],
            diffusion=policy | {"block_length": length},
        )
        engine.add(Request(uid, prompt_of(5), params))
    positions = -(-(5 + TOKENS) // length) * length - 5 if block_causal else TOKENS
    blocks = -(-(positions + 5) // length) if block_causal else -(-positions // length)
    settling = blocks * max(min(length, positions), 32)
    ids: dict[int, list[int]] = defaultdict(list)
    steps: dict[str, int] = defaultdict(int)
    for _ in range(positions + settling):
        for update in engine.step():
            ids[update.uid] += update.ids
            kind = asked[update.uid]["decoder"]["kind"]
            steps[kind] = max(steps[kind], update.forwards)
    assert engine.idle, [asked[s.uid] for s in engine.running]
    for uid, policy in enumerate(asked):
        assert len(ids[uid]) == TOKENS and MASK not in ids[uid], policy
    free = [kind for kind in kinds(AnyDecoder) if not kind.whole_slots]  # others: test_pinned.py
    assert steps.keys() == {kind.model_fields["kind"].default for kind in free}
    assert all(most <= positions for kind, most in steps.items() if kind != "edit"), steps
    assert positions < steps["edit"]


def test_editing_settles_for_as_many_steps_as_were_asked_for() -> None:
    """Where they are no more than the block has positions, the request decides."""
    spent = []
    for asked in (0, 4, 16, 32, LARGEST):
        model = Undecided(block_causal=True)
        decoder = {"kind": "edit", "threshold": 0, "max_post_edit_steps": asked}
        params = SamplingParams(
            max_tokens=32, ignore_eos=True, diffusion={"decoder": decoder, "block_length": 32}
        )
        last_update(toy_engine(model), Request(0, prompt_of(32), params))
        spent.append(model.forwards)
    assert [steps - spent[0] for steps in spent] == [0, 4, 16, 32, 32]


@pytest.mark.parametrize("value", [LARGEST + 1, 10**40, -(2**31), 1e308])
def test_numbers_that_tensors_cannot_hold_are_refused(value: float) -> None:
    fixed = {"decoder": {"kind": "fixed", "steps": value}}
    for part in ({"cfg_scale": value}, {"block_length": value}, fixed):
        with pytest.raises(ValueError, match=r"(cfg_scale|block_length|decoder\.steps): .*given: "):
            SamplingParams(diffusion=part)
