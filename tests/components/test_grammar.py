"""Fillings of a block under an automaton, against all fillings there are."""

import itertools
import math
import random
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor

from diffray.components.config import InvalidField
from diffray.components.grammar.automata import Automata
from diffray.components.grammar.automaton import Automaton
from diffray.components.grammar.bad_words import Sequences, avoiding, avoiding_within
from diffray.components.grammar.choose import Structured, choose_together
from diffray.components.grammar.paths import Entry, fill, of_classes
from diffray.components.logits import Logits
from diffray.components.mesh import Mesh
from diffray.components.propose import Draws, Rows, choose
from tests.helpers.decoding import block_of
from tests.helpers.random_grammars import random_automaton, state_after, steps_of, walk

SIZE, END = 5, 4


class Case(NamedTuple):
    automaton: Automaton
    fixed: list[int | None]  # the decided tokens of a block
    room: int  # positions after it
    value_LV: Tensor
    values: list[list[float]]  # the same

    def fillings(self) -> list[tuple[int, ...]]:
        choices = [range(SIZE) if token is None else (token,) for token in self.fixed]
        distance, steps = self.automaton.distance_Q.tolist(), steps_of(self.automaton, SIZE)
        found = []
        for ids in itertools.product(*choices):
            state = walk(steps, ids)
            if state is not None and distance[state] <= self.room:
                found.append(ids)
        return found

    def worth(self, ids: tuple[int, ...]) -> float:
        open_ = (at for at, token in enumerate(self.fixed) if token is None)
        return sum(self.values[at][ids[at]] for at in open_)

    def scores(self, *, drawn: bool) -> Tensor:
        automaton = self.automaton
        found: Tensor = of_classes(
            self.value_LV,
            torch.from_numpy(automaton.class_V).unsqueeze(0),
            torch.zeros(len(self.value_LV), dtype=torch.long),
            automaton.num_classes,
            drawn=drawn,
        )
        for at, token in enumerate(self.fixed):
            if token is not None:
                found[at] = -torch.inf
                found[at, automaton.class_V[token]] = 0
        return found

    def entry(self, rows: int) -> Entry:
        return Entry(
            torch.zeros(rows, dtype=torch.long),
            torch.ones(rows, len(self.fixed), dtype=torch.bool),
            torch.full((rows,), self.room),
        )

    def ids(self, class_L: Tensor, value_LV: Tensor) -> tuple[int, ...]:
        other_LV = torch.from_numpy(self.automaton.class_V) != class_L.unsqueeze(1)
        best = value_LV.masked_fill(other_LV, -torch.inf).argmax(1).tolist()
        return tuple(b if f is None else f for b, f in zip(best, self.fixed, strict=True))


def cases(count: int, seed: int = 7, *, avoided: bool = False) -> list[Case]:
    draw = random.Random(seed)
    found: list[Case] = []
    while len(found) < count:
        length = draw.randint(1, 4)
        value_LV = torch.randn(length, SIZE, generator=torch.manual_seed(len(found))).double()
        automaton = random_automaton(draw, SIZE, (END,))
        if avoided:
            sequences = random_sequences(draw)
            try:
                automaton = avoiding(sequences, frozenset(), frozenset(), SIZE)
            except InvalidField:
                continue
        values = value_LV.tolist()
        case = Case(automaton, [None] * length, draw.randint(0, 3), value_LV, values)
        if not (possible := case.fillings()):
            continue
        witness = draw.choice(possible)
        fixed = [token if draw.random() < 0.3 else None for token in witness]
        found.append(case._replace(fixed=fixed))
    return found


class Together(NamedTuple):
    """Cases side by side, padded with values that must not matter."""

    score_GLC: Tensor
    automata: Automata
    entry: Entry

    @staticmethod
    def of(cases: list[Case], *, drawn: bool) -> "Together":
        found = [case.scores(drawn=drawn) for case in cases]
        length, count = (max(each.shape[at] for each in found) for at in (0, 1))
        valid_GL = torch.zeros(len(cases), length, dtype=torch.bool)
        score_GLC = torch.full((len(cases), length, count), 100.0, dtype=torch.float64)
        for number, score_LC in enumerate(found):
            valid_GL[number, : len(score_LC)] = True
            score_GLC[number, : len(score_LC), : score_LC.shape[1]] = score_LC
        rooms = torch.tensor([case.room for case in cases])
        automata = Automata.join(tuple(case.automaton for case in cases), torch.device("cpu"))
        return Together(score_GLC, automata, Entry(torch.zeros_like(rooms), valid_GL, rooms))


def groups(found: list[Case]) -> list[list[Case]]:
    draw, parts = random.Random(5), []
    while found:
        size = draw.randint(1, 7)
        parts.append(found[:size] + found[: draw.randint(0, 2)])
        found = found[size:]
    return parts


@pytest.mark.parametrize("avoided", [False, True])
def test_the_best_filling_is_that_of_an_exhaustive_search(avoided: bool) -> None:
    for group in groups(cases(500, avoided=avoided)):
        score_GLC, automata, entry = Together.of(group, drawn=False)
        class_GL = fill(score_GLC, None, automata, entry)
        for case, class_L in zip(group, class_GL, strict=True):
            ids = case.ids(class_L[: len(case.fixed)], case.value_LV)
            assert ids == max(case.fillings(), key=case.worth)


def drawn(case: Case, count: int) -> Tensor:
    """Return what so many sequences draw that are alike but for their seeds, [B, L]."""
    mask, length = SIZE, len(case.fixed)
    class_V = np.append(case.automaton.class_V, case.automaton.num_classes)
    automaton = replace(case.automaton, class_V=class_V)
    ids_L = torch.tensor([mask if token is None else token for token in case.fixed])
    open_N = (ids_L == mask).nonzero().squeeze(1)
    number_B = torch.arange(count)
    cells_R = (number_B[:, None] * length + open_N).flatten()
    rows_R = torch.arange(len(cells_R))
    group = Structured(
        Automata.join((automaton,) * count, torch.device("cpu")),
        torch.arange(count * length).view(count, length), case.entry(count), rows_R, cells_R,
        Draws(rows_R, torch.ones(len(rows_R)).double(), None, None), None, rows_R,
    )  # fmt: skip
    value_RV = case.value_LV[open_N].repeat(count, 1)
    logits = Logits(torch.nn.functional.pad(value_RV, (0, 1)), 0, Mesh())
    ids_BL = ids_L.expand(count, -1)
    block = block_of(ids_BL == mask, ids_BL=ids_BL, seed_B=number_B)
    chosen = choose(logits, Rows(cells_R), block, mask)
    choose_together(chosen, group)
    return chosen.proposal().ids_BL


@pytest.mark.parametrize("number", range(6))
def test_drawn_fillings_have_the_probabilities_of_the_allowed_ones(number: int) -> None:
    case = [c for c in cases(60, seed=3) if 4 <= len(c.fillings()) <= 40][number]
    draws, possible = 3000, case.fillings()
    weights = [math.exp(case.worth(ids)) for ids in possible]
    counts = dict.fromkeys(possible, 0)
    for ids in drawn(case, draws).tolist():
        counts[tuple(ids)] += 1
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
        steps = steps_of(banned, SIZE)
        for state, distance in enumerate(banned.distance_Q.tolist()):
            ends = [
                len(ids)
                for length in range(5)
                for ids in itertools.product(range(1, SIZE), repeat=length)
                if walk(steps, ids, state) == banned.end
            ]
            assert min(ends, default=5) == min(distance, 5)


def test_no_text_has_what_is_avoided() -> None:
    """Nor does a text come to where nothing is allowed."""
    draw = random.Random(4)
    for _ in range(60):
        sequences = random_sequences(draw)
        banned = frozenset(draw.sample(range(SIZE), draw.randint(0, 2)))
        try:
            automaton = avoiding(sequences, banned, frozenset(), SIZE)
        except InvalidField:
            automaton = None
        forbidden = (*sequences, *((token,) for token in banned))
        assert (automaton is not None) == goes_on((), forbidden, 5)
        if automaton is not None:
            assert automaton.distance_Q.tolist() == [0] * len(automaton.distance_Q)
            steps = steps_of(automaton, SIZE)
            for length in range(4):
                for ids in itertools.product(range(SIZE), repeat=length):
                    assert (walk(steps, ids) is not None) == goes_on(ids, forbidden, 5)


def test_uncertain_tokens_are_allowed_where_others_are_too() -> None:
    avoid = avoiding(((0, 1),), frozenset(), frozenset({3}), 4)
    assert state_after(avoid, (0, 3, 0, 2)) is not None
    only = frozenset({2})  # after 0 there would be nothing but 3
    assert state_after(avoiding(((0, 1), (0, 0)), only, frozenset(), 4), (0, 3)) is not None
    assert state_after(avoiding(((0, 1), (0, 0)), only, frozenset({3}), 4), (0,)) is None


def test_a_grammar_and_what_is_avoided_are_both_kept() -> None:
    draw = random.Random(5)
    for _ in range(60):
        automaton, sequences = random_automaton(draw, SIZE, (END,)), random_sequences(draw)
        sequences = tuple(ids for ids in sequences if END not in ids) or ((0, 1),)
        both = avoiding_within(automaton.to_bytes(), sequences)
        steps, kept = steps_of(automaton, SIZE), steps_of(both, SIZE)
        for length in range(5):
            for ids in itertools.product(range(SIZE), repeat=length):
                wanted = walk(steps, ids) == automaton.end
                wanted &= not has_any(ids, sequences)
                assert (walk(kept, ids) == both.end) == wanted


def test_too_much_to_avoid_is_refused() -> None:
    with pytest.raises(InvalidField, match="give fewer, or shorter ones"):
        avoiding((tuple(range(300)),), frozenset(), frozenset(), 400)


def random_sequences(draw: random.Random) -> Sequences:
    lengths = [draw.randint(1, 3) for _ in range(draw.randint(1, 5))]
    return tuple(tuple(draw.randrange(SIZE) for _ in range(length)) for length in lengths)


def goes_on(ids: tuple[int, ...], forbidden: Sequences, more: int) -> bool:
    if has_any(ids, forbidden):
        return False
    return not more or any(goes_on((*ids, token), forbidden, more - 1) for token in range(SIZE))


def has_any(ids: tuple[int, ...], sequences: Sequences) -> bool:
    return any(ids[at : at + len(each)] == each for each in sequences for at in range(len(ids)))
