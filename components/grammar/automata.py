"""The automata of several sequences side by side, so that one pass chooses the tokens of all.

Letters: G sequences, A different automata, V vocabulary, C the most classes of an automaton; of all
sequences together: Q states, E edges, S sets of classes, M members of sets. Of runs: X owners, N
values.
"""

from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from diffray.components.backend import send
from diffray.components.grammar.automaton import Automaton

_KEPT = 64  # automata
_JOINED = 4  # lists of them, for batches that ask the same again


class Runs(NamedTuple):
    """Which values of a list belong together: those of a state's edges, or of a set's members."""

    start_X: Tensor  # of each owner's run; one more: the end of the list
    owner_N: Tensor
    longest: int

    def largest(self, value_N: Tensor) -> Tensor:
        """Return the largest value of each run, -inf if it is empty."""
        return self._reduced("max", value_N, -torch.inf)

    def log_sum(self, value_N: Tensor) -> Tensor:
        """Return the log-sum-exp of each run."""
        peak_X = self.largest(value_N).nan_to_num_(neginf=0.0)
        parts_N = (value_N - peak_X[self.owner_N]).exp_()
        return self._reduced("sum", parts_N, 0.0).log_() + peak_X

    def _reduced(self, reduce: str, value_N: Tensor, initial: float) -> Tensor:
        # With columns, CUDA has one thread for each run, which adds in order: ranks must agree.
        found: Tensor = torch.segment_reduce(
            value_N if value_N.dim() > 1 else value_N.unsqueeze(1),
            reduce,
            offsets=self.start_X,
            initial=initial,
            unsafe=True,
        )
        return found.view(-1, *value_N.shape[1:])

    def of(self, owner: Tensor) -> tuple[Tensor, Tensor]:
        """Return the places of some owners' runs, padded, and which are not padding."""
        place = self.start_X[owner].unsqueeze(-1) + torch.arange(self.longest, device=owner.device)
        return place.clamp(max=len(self.owner_N) - 1), place < self.start_X[owner + 1].unsqueeze(-1)


class Automata(NamedTuple):
    """The automata of G sequences. Each sequence has its own states and sets."""

    class_AV: Tensor  # 4 bytes each, as there may be many
    automaton_G: Tensor
    num_classes: int  # C
    first_G: Tensor  # each sequence's state 0
    sequence_Q: Tensor
    distance_Q: Tensor
    edges: Runs  # of each state
    set_E: Tensor
    next_E: Tensor
    members: Runs  # of each set
    class_M: Tensor  # index into [G, C]; the class itself is the remainder by C

    @staticmethod
    @lru_cache(_JOINED)
    def join(automata: tuple[Automaton, ...], device: torch.device) -> "Automata":
        """Return the automata of these sequences, on the device."""
        number = {each: at for at, each in enumerate(dict.fromkeys(automata))}
        lists = [_lists(automaton) for automaton in automata]
        classes = max(automaton.num_classes for automaton in number)
        states_G = torch.tensor([len(each.edges_Q) for each in lists])
        sets_G = torch.tensor([len(each.members_S) for each in lists])
        first_G, sequence_G = _before(states_G), torch.arange(len(lists))
        edges_G = torch.tensor([len(each.set_E) for each in lists])
        members_G = torch.tensor([len(each.class_M) for each in lists])

        def shifted(name: str, by_G: Tensor, count_G: Tensor) -> Tensor:
            values = torch.cat([getattr(each, name) for each in lists])
            return send(values + by_G.repeat_interleave(count_G), device)

        return Automata(
            torch.stack([_classes_on(automaton, device) for automaton in number]),
            send(torch.tensor([number[automaton] for automaton in automata]), device),
            classes,
            send(first_G, device),
            send(sequence_G.repeat_interleave(states_G), device),
            send(torch.cat([each.distance_Q for each in lists]), device),
            _runs(torch.cat([each.edges_Q for each in lists]), device),
            shifted("set_E", _before(sets_G), edges_G),
            shifted("next_E", first_G, edges_G),
            _runs(torch.cat([each.members_S for each in lists]), device),
            shifted("class_M", classes * sequence_G, members_G),
        )


class _Lists(NamedTuple):
    """An automaton's edges and members, without padding."""

    edges_Q: Tensor  # their number
    set_E: Tensor
    next_E: Tensor
    members_S: Tensor  # their number
    class_M: Tensor
    distance_Q: Tensor


@lru_cache(_KEPT)
def _lists(automaton: Automaton) -> _Lists:
    member_SC = automaton.member_SC[:-1, :-1]
    real_QD = automaton.set_QD < len(member_SC)
    edges = automaton.set_QD[real_QD], automaton.next_QD[real_QD]
    members = member_SC.sum(1), member_SC.nonzero()[1]
    lists = real_QD.sum(1), *edges, *members, automaton.distance_Q
    return _Lists(*map(torch.from_numpy, lists))


@lru_cache(_KEPT)
def _classes_on(automaton: Automaton, device: torch.device) -> Tensor:
    return send(torch.from_numpy(automaton.class_V).int(), device)


def _before(count_X: Tensor) -> Tensor:
    return count_X.cumsum(0) - count_X


def _runs(count_X: Tensor, device: torch.device) -> Runs:
    start_X = torch.nn.functional.pad(count_X.cumsum(0), (1, 0))
    owner_N = torch.arange(len(count_X)).repeat_interleave(count_X)
    return Runs(send(start_X, device), send(owner_N, device), int(count_X.max()))
