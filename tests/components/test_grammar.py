"""Fillings of a block under an automaton, against all there are."""

import itertools
import math
import random

import pytest
import torch

from diffray.components.grammar.automaton import UNREACHABLE, Automaton, build
from diffray.components.grammar.paths import Entry, fill, of_classes

END = 5  # the vocabulary's last token
SIZE = 6


def random_automaton(draw: random.Random) -> Automaton | None:
    states = draw.randint(1, 5)
    transitions = {
        state: {
            token: draw.randrange(states) for token in range(END) if draw.random() < draw.random()
        }
        for state in range(states)
    }
    accepting = [state for state in range(states) if draw.random() < 0.5]
    found = build(transitions, 0, accepting, (END,), SIZE)
    return found if found.shortest < UNREACHABLE else None


def accepts(automaton: Automaton, ids: tuple[int, ...], state: int = 0) -> int | None:
    for token in ids:
        try:
            state = automaton.step(state, token)
        except ValueError:
            return None
    return state


def fillings(automaton: Automaton, fixed: list[int | None], room: int) -> list[tuple[int, ...]]:
    choices = [range(SIZE) if token is None else (token,) for token in fixed]
    found = []
    for ids in itertools.product(*choices):
        state = accepts(automaton, ids)
        if state is not None and int(automaton.distance_Q[state]) <= room:
            found.append(ids)
    return found


def scores(
    value_LV: torch.Tensor, fixed: list[int | None], automaton: Automaton, *, drawn: bool
) -> torch.Tensor:
    count = automaton.member_SC.shape[1] - 1
    found = of_classes(value_LV, automaton.class_V, count, drawn=drawn)
    for at, token in enumerate(fixed):
        if token is not None:
            found[at] = -torch.inf
            found[at, automaton.class_V[token]] = 0
    return found.unsqueeze(0)


def ids_of(
    sets_BL: torch.Tensor, value_LV: torch.Tensor, fixed: list[int | None], automaton: Automaton
) -> tuple[int, ...]:
    allowed_LV = automaton.member_SC[sets_BL[0]][:, automaton.class_V]
    best = value_LV.masked_fill(~allowed_LV, -torch.inf).argmax(1).tolist()
    return tuple(b if f is None else f for b, f in zip(best, fixed, strict=True))


def cases(count: int) -> list[tuple[Automaton, list[int | None], int, int]]:
    draw, found = random.Random(7), []
    while len(found) < count:
        automaton = random_automaton(draw)
        if automaton is None:
            continue
        length, room = draw.randint(1, 5), draw.randint(0, 3)
        fixed: list[int | None] = [None] * length
        possible = fillings(automaton, fixed, room)
        if not possible:
            continue
        witness = draw.choice(possible)
        for at in range(length):
            if draw.random() < 0.3:
                fixed[at] = witness[at]
        found.append((automaton, fixed, room, draw.randrange(2**31)))
    return found


def entry(length: int, room: int) -> Entry:
    return Entry(
        torch.zeros(1, dtype=torch.long),
        torch.ones(1, length, dtype=torch.bool),
        torch.tensor([room]),
    )


def test_the_best_filling_is_that_of_an_exhaustive_search() -> None:
    for automaton, fixed, room, seed in cases(500):
        value_LV = torch.randn(len(fixed), SIZE, generator=torch.manual_seed(seed)).double()
        sets = fill(
            scores(value_LV, fixed, automaton, drawn=False),
            None,
            automaton,
            entry(len(fixed), room),
        )
        ids = ids_of(sets, value_LV, fixed, automaton)

        def worth(filling: tuple[int, ...]) -> float:
            return sum(
                float(value_LV[at, token]) for at, token in enumerate(filling) if fixed[at] is None
            )

        best = max(fillings(automaton, fixed, room), key=worth)
        assert ids == best


@pytest.mark.parametrize("case", range(6))
def test_drawn_fillings_have_the_probabilities_of_the_allowed_ones(case: int) -> None:
    many = [c for c in cases(60) if 4 <= len(fillings(c[0], c[1], c[2])) <= 40]
    automaton, fixed, room, seed = many[case]
    draws, length = 4000, len(fixed)
    generator = torch.manual_seed(seed)
    value_LV = torch.randn(length, SIZE, generator=generator).double()
    possible = fillings(automaton, fixed, room)
    weights = [
        math.exp(sum(float(value_LV[at, t]) for at, t in enumerate(f) if fixed[at] is None))
        for f in possible
    ]
    noise = -(-torch.rand(draws, length, SIZE, generator=generator).double().log()).log()
    mass = scores(value_LV, fixed, automaton, drawn=True)
    noisy = value_LV + noise
    score = torch.cat([scores(each, fixed, automaton, drawn=False) for each in noisy])
    where = entry(length, room)
    sets = fill(
        score,
        mass.expand_as(score),
        automaton,
        Entry(*(part.expand(draws, *part.shape[1:]) for part in where)),
    )
    counts = dict.fromkeys(possible, 0)
    for each, taken in zip(noisy, sets, strict=True):
        counts[ids_of(taken.unsqueeze(0), each, fixed, automaton)] += 1
    expected = [draws * w / sum(weights) for w in weights]
    chi2 = sum((n - e) ** 2 / e for n, e in zip(counts.values(), expected, strict=True))
    freedom = len(possible) - 1
    assert chi2 < freedom + 4 * math.sqrt(2 * freedom) + 4
