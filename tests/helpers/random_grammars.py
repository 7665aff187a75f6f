"""Random automata over small vocabularies, and what they accept."""

import random
from collections.abc import Collection
from collections.abc import Sequence as Items

import numpy as np

from diffray.components.grammar.automaton import UNREACHABLE, Automaton, build


def random_automaton(
    draw: random.Random, size: int, end_ids: Collection[int], states: int = 5
) -> Automaton:
    """Return an automaton that accepts some text; its start may be left only by a few tokens."""
    while True:
        number = draw.randint(1, states)
        next_VQ = np.full((size, number), -1)
        for state in range(number):
            share = draw.random()
            for token in range(size):
                if token not in end_ids and draw.random() < share:
                    next_VQ[token, state] = draw.randrange(number)
        accepting_Q = np.array([draw.random() < 0.5 for _ in range(number)])
        next_CQ, class_V = np.unique(next_VQ, axis=0, return_inverse=True)
        found = build(next_CQ, accepting_Q, class_V, end_ids)
        if found.shortest < UNREACHABLE:
            return found


def state_after(automaton: Automaton, ids: Items[int], state: int = 0) -> int | None:
    """Return the state after these tokens, or None where one is not allowed."""
    try:
        return automaton.follow(state, ids)
    except ValueError:
        return None


def steps_of(automaton: Automaton, size: int) -> list[list[int | None]]:
    """Return the state after each token in each state, or None where it is not allowed."""
    states = range(len(automaton.distance_Q))
    return [[state_after(automaton, (token,), state) for token in range(size)] for state in states]


def walk(steps: list[list[int | None]], ids: Items[int], state: int | None = 0) -> int | None:
    """Return the state after these tokens, as `state_after` does, in little time."""
    for token in ids:
        if state is None:
            return None
        state = steps[state][token]
    return state


def random_ids(automaton: Automaton, draw: random.Random, budget: int) -> list[int]:
    """Return at most so many tokens that the automaton accepts, without the end."""
    state, ids = 0, list[int]()
    while True:
        budget -= 1
        ways = zip(automaton.set_QD[state].tolist(), automaton.next_QD[state].tolist(), strict=True)
        classes, state = draw.choice(
            [
                (automaton.member_SC[number], following)
                for number, following in ways
                if automaton.member_SC[number].any() and automaton.distance_Q[following] <= budget
            ]
        )
        if state == automaton.end:
            return ids
        ids.append(draw.choice(classes[automaton.class_V].nonzero()[0].tolist()))
