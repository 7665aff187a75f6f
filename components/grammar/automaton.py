"""A deterministic automaton over token ids: which texts a guided answer may become.

Tokens that lead from every state to the same one are of one class; edges between two states carry
a set of classes. That keeps an automaton small: a JSON schema over 150,000 tokens takes some
hundred classes, sets and states.

Letters: V vocabulary, C classes, S sets of classes, Q states, D edges of the state that has most.
"""

import io
from collections import defaultdict
from collections.abc import Collection, Mapping
from collections.abc import Sequence as Items
from dataclasses import dataclass, fields, replace
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from diffray.components.backend import send

UNREACHABLE = 1 << 30  # a distance; more tokens than any canvas has

_KEPT = 64  # automata in memory

Transitions = Mapping[int, Mapping[int, int]]


@dataclass(frozen=True, slots=True, eq=False)
class Automaton:
    """States are numbered from 0, the start; the last one is the end, which end tokens lead to.

    Missing edges are padded with the set S, which is empty, and lead to their own state.
    """

    class_V: Tensor  # of each token; C: of none, so never allowed
    member_SC: Tensor  # which classes a set has; the last row and column are empty
    set_QD: Tensor
    next_QD: Tensor
    distance_Q: Tensor  # the fewest tokens from a state to the end

    @property
    def end(self) -> int:
        return len(self.distance_Q) - 1

    @property
    def num_classes(self) -> int:
        return self.member_SC.shape[1] - 1

    @property
    def shortest(self) -> int:
        """The fewest tokens of an answer, its end token included."""
        return int(self.distance_Q[0])

    def follow(self, state: int, ids: Items[int]) -> int:
        """Return the state after these tokens; raises ValueError where one is not allowed."""
        for class_id in self.class_V[torch.tensor(ids, dtype=torch.long)].tolist():
            fits_D = self.member_SC[self.set_QD[state], class_id]
            if not fits_D.any():
                raise ValueError("the text does not follow its grammar")
            state = int(self.next_QD[state, int(fits_D.int().argmax())])
        return state

    def without(self, banned: frozenset[int]) -> "Automaton":
        """Return the automaton in which these tokens are never allowed."""
        if not banned:
            return self
        none = self.member_SC.shape[1] - 1
        class_V = self.class_V.clone()
        class_V[torch.tensor(sorted(banned))] = none
        live_C = torch.zeros(none + 1, dtype=torch.bool)
        live_C[class_V] = True
        live_S = (self.member_SC & live_C).any(1)
        return replace(self, class_V=class_V, distance_Q=_distances(self, live_S))

    def on(self, device: torch.device) -> "Automaton":
        """Return a copy on the device."""
        return Automaton(*(send(part, device) for part in self._parts))

    def to_bytes(self) -> bytes:
        """Return the automaton, compressed; a vocabulary has long runs of one class."""
        out = io.BytesIO()
        np.savez_compressed(out, *(part.numpy() for part in self._parts))
        return out.getvalue()

    @staticmethod
    @lru_cache(_KEPT)
    def from_bytes(data: bytes) -> "Automaton":
        with np.load(io.BytesIO(data)) as parts:
            return Automaton(*(torch.from_numpy(parts[f"arr_{at}"]) for at in range(len(parts))))

    @property
    def _parts(self) -> list[Tensor]:
        return [getattr(self, field.name) for field in fields(self)]


def build(
    transitions: Transitions,
    start: int,
    accepting: Collection[int],
    end_ids: Collection[int],
    vocab_size: int,
) -> Automaton:
    """Return the automaton with these transitions, and end tokens wherever it accepts."""
    edges: dict[int, dict[int, list[int]]] = {}
    for state, targets in transitions.items():
        tokens: dict[int, list[int]] = defaultdict(list)
        for token, target in targets.items():
            if token not in end_ids:
                tokens[target].append(token)
        edges[state] = tokens
    names = _reached(edges, start)
    end = len(names)
    numbered = {
        names[state]: {names[target]: tokens for target, tokens in targets.items()}
        for state, targets in edges.items()
        if state in names
    }
    for state in accepting:
        if state in names:
            numbered.setdefault(names[state], {})[end] = sorted(end_ids)
    numbered[end] = {end: sorted(end_ids)}
    class_V, none = _classes(numbered, vocab_size)
    return _assemble(numbered, class_V, none)


def _reached(edges: Mapping[int, Mapping[int, list[int]]], start: int) -> dict[int, int]:
    """Return the states that can be reached, numbered in the order in which they are found."""
    names, queue = {start: 0}, [start]
    for state in queue:
        for target in edges.get(state, ()):
            if target not in names:
                names[target] = len(names)
                queue.append(target)
    return names


def _classes(
    edges: Mapping[int, Mapping[int, list[int]]], vocab_size: int
) -> tuple[np.ndarray, int]:
    """Return each token's class, and the number of the class that is never allowed.

    Tokens are of one class if they are on the same edges, told by a sum of random numbers.
    """
    draw = np.random.default_rng(0)
    marks_V = np.zeros(vocab_size, dtype=np.uint64)
    for targets in edges.values():
        for tokens in targets.values():
            marks_V[tokens] += draw.integers(1, 2**63, dtype=np.uint64)
    marks, class_V = np.unique(marks_V, return_inverse=True)
    if marks[0] == 0:  # tokens on no edge
        class_V = np.where(class_V == 0, len(marks) - 1, class_V - 1)
        return class_V, len(marks) - 1
    return class_V, len(marks)


def _assemble(
    edges: Mapping[int, Mapping[int, list[int]]], class_V: np.ndarray, none: int
) -> Automaton:
    sets: dict[tuple[int, ...], int] = {}
    rows: list[list[tuple[int, int]]] = []
    for state in range(len(edges) if max(edges) < len(edges) else max(edges) + 1):
        row = []
        for target, tokens in edges.get(state, {}).items():
            classes = tuple(np.unique(class_V[tokens]).tolist())
            row.append((sets.setdefault(classes, len(sets)), target))
        rows.append(row)
    member_SC = torch.zeros(len(sets) + 1, none + 1, dtype=torch.bool)
    for classes, number in sets.items():
        member_SC[number, list(classes)] = True
    width = max(map(len, rows))
    set_QD = torch.full((len(rows), width), len(sets))
    next_QD = torch.arange(len(rows)).unsqueeze(1).repeat(1, width)
    for state, row in enumerate(rows):
        if row:
            set_QD[state, : len(row)], next_QD[state, : len(row)] = torch.tensor(row).unbind(1)
    live_S = member_SC.any(1)
    found = Automaton(torch.from_numpy(class_V), member_SC, set_QD, next_QD, torch.empty(0))
    return replace(found, distance_Q=_distances(found, live_S))


def _distances(automaton: Automaton, live_S: Tensor) -> Tensor:
    """Return the fewest tokens from each state to the end, over sets that have a token."""
    end = len(automaton.set_QD) - 1
    distance_Q = torch.full((end + 1,), UNREACHABLE)
    distance_Q[end] = 0
    while True:
        over_QD = torch.where(
            live_S[automaton.set_QD], distance_Q[automaton.next_QD] + 1, UNREACHABLE
        )
        nearer_Q = torch.minimum(distance_Q, over_QD.amin(1))
        if torch.equal(nearer_Q, distance_Q):
            return distance_Q
        distance_Q = nearer_Q
