"""Random automata over small vocabularies, and what they accept."""

import random
from collections.abc import Collection
from collections.abc import Sequence as Items

from diffray.components.grammar.automaton import UNREACHABLE, Automaton, build


def random_automaton(
    draw: random.Random, size: int, end_ids: Collection[int], states: int = 5
) -> Automaton:
    """Return an automaton that accepts some text; its start may be left only by a few tokens."""
    while True:
        number = draw.randint(1, states)
        transitions = {}
        for state in range(number):
            share = draw.random()
            transitions[state] = {
                token: draw.randrange(number)
                for token in range(size)
                if token not in end_ids and draw.random() < share
            }
        accepting = [state for state in range(number) if draw.random() < 0.5]
        found = build(transitions, 0, accepting, end_ids, size)
        if found.shortest < UNREACHABLE:
            return found


def state_after(automaton: Automaton, ids: Items[int], state: int = 0) -> int | None:
    """Return the state after these tokens, or None where one is not allowed."""
    try:
        return automaton.follow(state, ids)
    except ValueError:
        return None
