"""Automata that avoid sequences of tokens, alone or together with structured outputs.

Letters: V vocabulary, C classes of tokens, Q states of the automaton that avoids, P states of a
grammar, T tokens that the sequences have.
"""

from dataclasses import replace
from functools import lru_cache
from typing import Final, NamedTuple

import numpy as np

from diffray.components.config import InvalidField
from diffray.components.grammar.automaton import Automaton, assemble, build, of_reached

Sequences = tuple[tuple[int, ...], ...]

MOST_ENTRIES: Final = 2**16  # tokens x states; such automata take some milliseconds a step
MOST_TOGETHER: Final = 2**19  # with a grammar: tenths of a second, before the request runs


class _Machine(NamedTuple):
    """The state after a token of each class, or -1 where it would complete a sequence."""

    next_CQ: np.ndarray
    class_V: np.ndarray


@lru_cache(64)
def avoiding(
    sequences: Sequences, banned: frozenset[int], uncertain: frozenset[int], vocab_size: int
) -> Automaton:
    """Return the automaton of all texts without these sequences, which may stop anywhere.

    `banned` tokens are never allowed, `uncertain` ones not always. Raises InvalidField if no text
    can continue.
    """
    next_CQ, class_V = _machine(sequences, vocab_size)
    class_V[list(banned)] = len(next_CQ)  # none
    certain_V = np.delete(class_V, list(uncertain))
    next_LQ = next_CQ[np.isin(np.arange(len(next_CQ)), certain_V)]
    alive_Q = np.ones(next_CQ.shape[1] + 1, dtype=bool)
    alive_Q[-1] = False  # for -1
    before = 0
    while before != (before := int(alive_Q.sum())):  # as long as there are dead ends
        alive_Q[:-1] &= alive_Q[next_LQ].any(0)
    if not alive_Q[0]:
        raise InvalidField("bad_words leave no text of the allowed tokens; allow more", "bad_words")
    found = assemble(np.where(alive_Q[next_CQ], next_CQ, -1), class_V)
    return replace(found, distance_Q=np.zeros_like(found.distance_Q))


@lru_cache(256)
def restricted(grammar: bytes, banned: frozenset[int], sequences: Sequences) -> Automaton:
    """Return a grammar's automaton without these tokens and sequences; results are cached."""
    if sequences:
        return avoiding_within(grammar, sequences).without(banned)
    return Automaton.from_bytes(grammar).without(banned)


@lru_cache(64)
def avoiding_within(grammar: bytes, sequences: Sequences) -> Automaton:
    """Return the automaton of a grammar's texts without these sequences."""
    automaton = Automaton.from_bytes(grammar)
    other = _machine(sequences, len(automaton.class_V))
    next_KP, class_V = _dense(automaton)
    states = next_KP.shape[1] - 1  # without the end
    (end_class,) = (next_KP[:, -1] == states).nonzero()[0]
    ends_V, none_V = class_V == end_class, class_V == len(next_KP)
    pairs, pair_V = np.unique(class_V * len(other.next_CQ) + other.class_V, return_inverse=True)
    own_C, others_C = np.divmod(pairs, len(other.next_CQ))
    kept_C = (own_C != end_class) & (own_C < len(next_KP))
    count = other.next_CQ.shape[1]
    if kept_C.sum() * states * count > MOST_TOGETHER:
        raise InvalidField(
            "bad_words of several tokens need too large an automaton together with these "
            "structured outputs; leave one of them out",
            "bad_words",
        )
    number_C = np.where(kept_C, kept_C.cumsum() - 1, -1)
    own_CP1 = next_KP[own_C[kept_C], :states, None]
    others_C1Q = other.next_CQ[others_C[kept_C], None]
    next_CPQ = np.where((own_CP1 < 0) | (others_C1Q < 0), -1, own_CP1 * count + others_C1Q)
    found = build(
        next_CPQ.reshape(-1, states * count),
        (next_KP[end_class, :states] == states).repeat(count),
        np.where(none_V, -1, number_C[pair_V]),
        ends_V.nonzero()[0].tolist(),
    )
    if not automaton.shortest:
        found = found.cut_at_first()
    return replace(found, depth=automaton.depth)


def _machine(sequences: Sequences, vocab_size: int) -> _Machine:
    """Return the Aho-Corasick automaton, whose states are the prefixes of the sequences."""
    tokens = sorted({token for ids in sequences for token in ids})
    if (1 + sum(map(len, sequences))) * (1 + len(tokens)) > MOST_ENTRIES:
        raise InvalidField(
            "bad_words of several tokens: these need too large an automaton; give fewer, or "
            "shorter ones",
            "bad_words",
        )
    number = {token: at for at, token in enumerate(tokens)}
    children: list[dict[int, int]] = [{}]
    whole = [False]
    for ids in sequences:
        state = 0
        for token in ids:
            if (at := number[token]) not in children[state]:
                children[state][at] = len(children)
                children.append({})
                whole.append(False)
            state = children[state][at]
        whole[state] = True
    next_QT = np.zeros((len(children), len(tokens) + 1), dtype=np.int64)  # the last: all others
    shorter = [0] * len(children)  # the longest proper suffix of a state that is a state too
    queue = [0]
    for state in queue:
        whole[state] |= whole[shorter[state]]
        next_QT[state] = next_QT[shorter[state]]
        for at, child in children[state].items():
            shorter[child] = int(next_QT[state, at]) if state else 0
            next_QT[state, at] = child
            queue.append(child)
    next_QT = np.where(np.array(whole)[next_QT], -1, next_QT)
    next_CQ, class_T = np.unique(next_QT.T, axis=0, return_inverse=True)
    class_V = np.full(vocab_size, class_T[-1])
    class_V[tokens] = class_T[:-1]
    return _Machine(of_reached(next_CQ)[0], class_V)


def _dense(automaton: Automaton) -> tuple[np.ndarray, np.ndarray]:
    """Return the state after a token of each class in each state, or -1, and each token's class."""
    member_SC = automaton.member_SC[:, :-1]
    live_S = np.asarray(member_SC.any(1))
    state_E, place_E = live_S[automaton.set_QD].nonzero()
    edge_N, class_N = member_SC[automaton.set_QD[state_E, place_E]].nonzero()
    next_KP = np.full((automaton.num_classes, len(automaton.set_QD)), -1)
    next_KP[class_N, state_E[edge_N]] = automaton.next_QD[state_E, place_E][edge_N]
    return next_KP, automaton.class_V
