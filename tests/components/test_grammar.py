"""Fillings of a block under an automaton, against all fillings there are."""

import itertools
import math
import random
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from diffray.components.grammar.automaton import Automaton
from diffray.components.grammar.paths import Entry, fill, of_classes
from tests.helpers.random_grammars import random_automaton, state_after

SIZE, END = 5, 4


class Case(NamedTuple):
    automaton: Automaton
    fixed: list[int | None]  # the decided tokens of a block
    room: int  # positions after it
    value_LV: Tensor

    def fillings(self) -> list[tuple[int, ...]]:
        """Return all that keep the decided tokens and leave room enough."""
        choices = [range(SIZE) if token is None else (token,) for token in self.fixed]
        distance = self.automaton.distance_Q.tolist()
        found = []
        for ids in itertools.product(*choices):
            state = state_after(self.automaton, ids)
            if state is not None and distance[state] <= self.room:
                found.append(ids)
        return found

    def worth(self, ids: tuple[int, ...]) -> float:
        """Return the sum of the logits of what is filled in."""
        open_ = (at for at, token in enumerate(self.fixed) if token is None)
        return sum(float(self.value_LV[at, ids[at]]) for at in open_)

    def scores(self, value_LV: Tensor, *, drawn: bool) -> Tensor:
        automaton = self.automaton
        found: Tensor = of_classes(value_LV, automaton.class_V, automaton.num_classes, drawn=drawn)
        for at, token in enumerate(self.fixed):
            if token is not None:
                found[at] = -torch.inf
                found[at, automaton.class_V[token]] = 0
        return found

    def entry(self, rows: int = 1) -> Entry:
        return Entry(
            torch.zeros(rows, dtype=torch.long),
            torch.ones(rows, len(self.fixed), dtype=torch.bool),
            torch.full((rows,), self.room),
        )

    def ids(self, sets_L: Tensor, value_LV: Tensor) -> tuple[int, ...]:
        allowed_LV = self.automaton.member_SC[sets_L][:, self.automaton.class_V]
        best = value_LV.masked_fill(~allowed_LV, -torch.inf).argmax(1).tolist()
        return tuple(b if f is None else f for b, f in zip(best, self.fixed, strict=True))


def cases(count: int, seed: int = 7) -> list[Case]:
    draw = random.Random(seed)
    found: list[Case] = []
    while len(found) < count:
        length = draw.randint(1, 4)
        value_LV = torch.randn(length, SIZE, generator=torch.manual_seed(len(found))).double()
        automaton = random_automaton(draw, SIZE, (END,))
        case = Case(automaton, [None] * length, draw.randint(0, 3), value_LV)
        if not (possible := case.fillings()):
            continue
        witness = draw.choice(possible)
        fixed = [token if draw.random() < 0.3 else None for token in witness]
        found.append(case._replace(fixed=fixed))
    return found


def test_the_best_filling_is_that_of_an_exhaustive_search() -> None:
    for case in cases(500):
        sets_BL = fill(
            case.scores(case.value_LV, drawn=False)[None], None, case.automaton, case.entry()
        )
        assert case.ids(sets_BL[0], case.value_LV) == max(case.fillings(), key=case.worth)


@pytest.mark.parametrize("number", range(6))
def test_drawn_fillings_have_the_probabilities_of_the_allowed_ones(number: int) -> None:
    case = [c for c in cases(60, seed=3) if 4 <= len(c.fillings()) <= 40][number]
    draws, possible = 3000, case.fillings()
    weights = [math.exp(case.worth(ids)) for ids in possible]
    uniform = torch.rand(draws, *case.value_LV.shape, generator=torch.manual_seed(number)).double()
    noisy = case.value_LV - (-uniform.log()).log()
    score = torch.stack([case.scores(each, drawn=False) for each in noisy])
    mass = case.scores(case.value_LV, drawn=True).expand_as(score)
    sets = fill(score, mass, case.automaton, case.entry(draws))
    counts = dict.fromkeys(possible, 0)
    for each, taken in zip(noisy, sets, strict=True):
        counts[case.ids(taken, each)] += 1
    expected = [draws * weight / sum(weights) for weight in weights]
    chi_squared = sum((n - e) ** 2 / e for n, e in zip(counts.values(), expected, strict=True))
    freedom = len(possible) - 1
    assert chi_squared < freedom + 4 * math.sqrt(2 * freedom) + 4


def test_an_automaton_survives_its_bytes_and_a_ban() -> None:
    for case in cases(30):
        automaton = case.automaton
        again = Automaton.from_bytes(automaton.to_bytes())
        banned = again.without(frozenset({0}))
        for ids in itertools.product(range(SIZE), repeat=3):
            state = state_after(automaton, ids)
            assert state_after(again, ids) == state
            assert state_after(banned, ids) == (None if 0 in ids else state)
        for state, distance in enumerate(banned.distance_Q.tolist()):
            ends = [
                len(ids)
                for length in range(5)
                for ids in itertools.product(range(1, SIZE), repeat=length)
                if state_after(banned, ids, state) == banned.end
            ]
            assert min(ends, default=5) == min(distance, 5)
