"""A deterministic automaton over token ids: the texts that a structured answer may be.

Tokens that lead from every state to the same next state form a class; an edge between two states
carries a set of classes. That keeps an automaton small: a JSON schema over 150,000 tokens takes a
few hundred classes, sets and states.

Letters: V vocabulary, C classes, S sets of classes, Q states, D the most edges of a state.
"""

import io
from collections import defaultdict
from collections.abc import Collection
from collections.abc import Sequence as Items
from dataclasses import dataclass, fields, replace
from functools import lru_cache

import numpy as np

UNREACHABLE = 1 << 30  # a distance; more tokens than any canvas has

_KEPT = 256  # automata in memory


@dataclass(frozen=True, slots=True, eq=False)
class Automaton:
    """States are numbered from 0, the start; the last one is the end, which end tokens lead to.

    Missing edges are padded with the set S, which is empty, and lead to their own state.
    """

    class_V: np.ndarray  # of each token; C means no class, so the token is never allowed
    member_SC: np.ndarray  # which classes a set has; the last row and column are empty
    set_QD: np.ndarray
    next_QD: np.ndarray
    distance_Q: np.ndarray  # the fewest tokens from a state to the end; 0 where it may be cut
    # How deep its texts nest the rules of a context-free grammar; None if it accepts all texts.
    depth: int | None = None

    @property
    def end(self) -> int:
        return len(self.distance_Q) - 1

    @property
    def num_classes(self) -> int:
        return len(self.member_SC.T) - 1

    @property
    def shortest(self) -> int:
        """The fewest tokens of an answer, its end token included."""
        return int(self.distance_Q[0])

    def follow(self, state: int, ids: Items[int]) -> int:
        """Return the state after these tokens; raises ValueError if one is not allowed."""
        for class_id in self.class_V[np.array(ids, dtype=np.int64)].tolist():
            fits_D = self.member_SC[self.set_QD[state], class_id]
            if not fits_D.any():
                raise ValueError("the text does not follow its grammar")
            state = int(self.next_QD[state, int(fits_D.argmax())])
        return state

    def without(self, banned: frozenset[int]) -> "Automaton":
        """Return the automaton in which these tokens are never allowed."""
        if not banned:
            return self
        none = self.member_SC.shape[1] - 1
        class_V = self.class_V.copy()
        class_V[sorted(banned)] = none
        live_C = np.zeros(none + 1, dtype=bool)
        live_C[class_V] = True
        live_S = np.asarray((self.member_SC & live_C).any(1))
        distance_Q = _distances(self, live_S)
        distance_Q[(self.distance_Q == 0) & (distance_Q < UNREACHABLE)] = 0
        return replace(self, class_V=class_V, distance_Q=distance_Q)

    def cut_at_first(self) -> "Automaton":
        """Return the same, whose texts may be cut as long as they could have ended so far."""
        found, queue = self.distance_Q.copy(), [0]
        for state in queue:
            if found[state] == 1:
                found[state] = 0
                queue += self.next_QD[state].tolist()
        return replace(self, distance_Q=found)

    def to_bytes(self) -> bytes:
        """Return the automaton, compressed; a vocabulary has long runs of one class."""
        out = io.BytesIO()
        depth = [] if self.depth is None else [self.depth]
        np.savez_compressed(out, depth, *self._parts.values())
        return out.getvalue()

    @staticmethod
    @lru_cache(_KEPT)
    def from_bytes(data: bytes) -> "Automaton":
        with np.load(io.BytesIO(data)) as parts:
            depth, *found = (parts[f"arr_{at}"] for at in range(len(parts)))
            class_V, member_SC, set_QD, next_QD, distance_Q = found
            nested = int(depth[0]) if len(depth) else None
            return Automaton(class_V, member_SC, set_QD, next_QD, distance_Q, nested)

    @property
    def _parts(self) -> dict[str, np.ndarray]:
        return {field.name: getattr(self, field.name) for field in fields(self)[:-1]}


def build(
    next_CQ: np.ndarray,
    accepting_Q: np.ndarray,
    class_V: np.ndarray,
    end_ids: Collection[int],
) -> Automaton:
    """Return an automaton that starts in state 0 and may end wherever it accepts.

    `next_CQ` has the state after a token of each class, or -1; `class_V` has -1 for tokens that are
    never allowed.
    """
    next_CQ, reached_Q = of_reached(next_CQ)
    end = int(reached_Q.sum())
    of_end_Q = np.where(accepting_Q[reached_Q], end, -1)
    next_CQ = np.pad(np.vstack([next_CQ, of_end_Q]), ((0, 0), (0, 1)), constant_values=-1)
    next_CQ[-1, end] = end
    live_C = np.asarray((next_CQ >= 0).any(1))
    class_V = np.where(class_V < 0, len(live_C), class_V)  # none, for now
    class_V[list(end_ids)] = len(live_C) - 1
    number_C = np.append(np.where(live_C, live_C.cumsum() - 1, live_C.sum()), live_C.sum())
    return assemble(next_CQ[live_C], number_C[class_V])


def of_texts(texts: Items[tuple[int, ...]], end_ids: Collection[int], vocab_size: int) -> Automaton:
    """Return the automaton of these texts, each in its own tokens."""
    inner = dict.fromkeys(text[:stop] for text in texts for stop in range(len(text)))
    state_of = {prefix: state for state, prefix in enumerate(inner)}
    last = len(state_of)  # of all texts that no other continues
    tokens = sorted({token for text in texts for token in text})
    class_of = {token: number for number, token in enumerate(tokens)}
    next_CQ = np.full((len(tokens), last + 1), -1, dtype=np.int32)
    for text in texts:
        for at, token in enumerate(text):
            following = state_of.get(text[: at + 1], last)
            next_CQ[class_of[token], state_of[text[:at]]] = following
    accepting_Q = np.zeros(last + 1, dtype=bool)
    accepting_Q[[state_of.get(text, last) for text in texts]] = True
    class_V = np.full(vocab_size, -1)
    class_V[tokens] = range(len(tokens))
    return build(next_CQ, accepting_Q, class_V, end_ids)


def of_reached(next_CQ: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the table of the states that can be reached from state 0, and which these are."""
    reached_Q = np.zeros(next_CQ.shape[1] + 1, dtype=bool)  # the last one is for -1
    new = np.array([0])
    while len(new):
        reached_Q[new] = True
        following = np.unique(next_CQ[:, new])
        new = following[~reached_Q[following] & (following >= 0)]
    reached_Q = reached_Q[:-1]
    number_Q = np.where(reached_Q, reached_Q.cumsum() - 1, -1)  # the start stays 0
    return np.where(next_CQ < 0, -1, number_Q[next_CQ])[:, reached_Q], reached_Q


def assemble(next_CQ: np.ndarray, class_V: np.ndarray) -> Automaton:
    """Gather the classes that lead from one state to another into sets.

    Equal sets are recognized by sums of random numbers, one for each class.
    """
    classes, states = next_CQ.shape
    class_N, state_N = (next_CQ >= 0).nonzero()
    target_N = next_CQ[class_N, state_N]
    order_N = np.lexsort((class_N, target_N, state_N))
    class_N, state_N, target_N = class_N[order_N], state_N[order_N], target_N[order_N]
    first_N = np.ones(len(order_N), dtype=bool)
    first_N[1:] = (np.diff(state_N) != 0) | (np.diff(target_N) != 0)
    edge_N, begin_E = first_N.cumsum() - 1, first_N.nonzero()[0]
    marks_C = np.random.default_rng(0).integers(1, 2**63, size=(classes,), dtype=np.uint64)
    marks_E: np.ndarray = np.add.reduceat(marks_C[class_N], begin_E)
    _, first_S, set_E = np.unique(marks_E, return_index=True, return_inverse=True)
    count = len(first_S)
    member_SC = np.zeros((count + 1, classes + 1), dtype=bool)
    kept_N = first_S[set_E[edge_N]] == edge_N  # of one edge for each set
    member_SC[set_E[edge_N[kept_N]], class_N[kept_N]] = True
    state_E = state_N[begin_E]
    place_E = np.arange(len(state_E)) - np.searchsorted(state_E, state_E)
    width = int(place_E.max(initial=0)) + 1
    set_QD = np.full((states, width), count)
    next_QD = np.arange(states)[:, None].repeat(width, 1)
    set_QD[state_E, place_E], next_QD[state_E, place_E] = set_E, target_N[begin_E]
    found = Automaton(class_V, member_SC, set_QD, next_QD, distance_Q=np.empty(0))
    return replace(found, distance_Q=_distances(found, np.asarray(member_SC.any(1))))


def _distances(automaton: Automaton, live_S: np.ndarray) -> np.ndarray:
    """Return the fewest tokens from each state to the end, over sets that have a token."""
    live_QD = live_S[automaton.set_QD]
    sources: defaultdict[int, list[int]] = defaultdict(list)
    edges = zip(live_QD.nonzero()[0].tolist(), automaton.next_QD[live_QD].tolist(), strict=True)
    for source, target in edges:
        sources[target].append(source)
    distances = [UNREACHABLE] * len(automaton.set_QD)
    distances[-1] = 0
    queue = [len(distances) - 1]
    for state in queue:
        for source in sources[state]:
            if distances[source] == UNREACHABLE:
                distances[source] = distances[state] + 1
                queue.append(source)
    return np.array(distances)
