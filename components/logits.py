"""Logit rows whose vocabulary is sharded over the ranks, and the operations on them.

No rank holds another's logits: each result is combined from one small tuple per rank, and is equal
on all ranks, bit by bit, because they combine the same gathered tuples.

Letters: R rows, V this rank's slice of the vocabulary, K requested ids per row, Q rows
with a request, W ranks, B values of a digit, G texts of N ids.
"""

from collections.abc import Callable
from collections.abc import Sequence as Items

import torch
from torch import Tensor
from torch.nn.functional import pad

from diffray.components.backend import rows_at_a_time
from diffray.components.grammar.automata import Automata
from diffray.components.grammar.paths import of_classes, with_classes
from diffray.components.mesh import Mesh
from diffray.kernels import noise

_DIGITS = 11, 11, 10  # bits of a float32
_PARTS = 2.0**40  # weight of the largest probability; a vocabulary's sum fits 64 bits


class Logits:
    """[R, V] logits of this rank; ids are those of the whole vocabulary."""

    def __init__(self, values_RV: Tensor, start: int, mesh: Mesh) -> None:
        wide = values_RV if values_RV.dtype == torch.float64 else values_RV.float()
        self.values_RV = wide
        self.start = start
        self.mesh = mesh

    @property
    def _ids_V(self) -> Tensor:
        size = self.values_RV.shape[1]
        return torch.arange(self.start, self.start + size, device=self.values_RV.device)

    def add(self, rows_E: Tensor, ids_E: Tensor, values_E: Tensor) -> None:
        """Add to single logits, in place; -inf forbids a token."""
        local, here = self.local(ids_E)
        ours = torch.where(here, values_E.to(self.values_RV), 0.0)
        self.values_RV.index_put_((rows_E, local), ours, accumulate=True)

    def forbid(self, token_id: int) -> None:
        """Set one token's logit to -inf in every row, in place."""
        if self.start <= token_id < self.start + self.values_RV.shape[1]:
            self.values_RV[:, token_id - self.start] = -torch.inf

    def put(self, token_id: int, values_R: Tensor) -> None:
        """Set one token's logit in each row, in place."""
        if self.start <= token_id < self.start + self.values_RV.shape[1]:
            self.values_RV[:, token_id - self.start] = values_R

    def keep_only(self, rows: slice, ids_K: Tensor) -> None:
        """Set all but these ids to -inf in some rows, in place."""
        local, here = self.local(ids_K)
        # Counted, because ids of other ranks are clamped onto columns that may be allowed too.
        named_V = torch.zeros_like(self._ids_V).index_add_(0, local, here.long())
        self.values_RV[rows].masked_fill_(named_V == 0, -torch.inf)

    def counts(self, ids_GN: Tensor, counted_GN: Tensor) -> Tensor:
        """Return how often each of this rank's ids is among the counted ones, [G, V]."""
        local_GN, here_GN = self.local(ids_GN)
        ours_GN = (counted_GN & here_GN).to(self.values_RV)
        none_GV = self.values_RV.new_zeros(len(ids_GN), self.values_RV.shape[1])
        return none_GV.scatter_add_(1, local_GN, ours_GN)

    def some(self, rows_Q: Tensor) -> "Logits":
        """Return some rows, copied."""
        return Logits(self.values_RV[rows_Q], self.start, self.mesh)

    def of_classes(self, automata: Automata, sequence_R: Tensor, *, drawn: bool) -> Tensor:
        """Return the largest logit of each class of tokens, or if `drawn` their log-sum-exp."""
        which = self._classes(automata), automata.automaton_G[sequence_R]
        found_RC = of_classes(self.values_RV, *which, automata.num_classes, drawn=drawn)
        found_WRC = self.mesh.all_gather(found_RC)
        return found_WRC.logsumexp(0) if drawn else found_WRC.amax(0)

    def best_in(self, automata: Automata, sequence_R: Tensor, class_R: Tensor) -> Tensor:
        """Return each row's best token of its class; forbid other classes, in place."""
        return self._best_of(self._of_class(automata, sequence_R, class_R))[1]

    def draw_in(
        self,
        automata: Automata,
        sequence_R: Tensor,
        class_R: Tensor,
        key: tuple[Tensor, Tensor, Tensor],
    ) -> Tensor:
        """Draw each row's token from its class with one random number; the logits are used up.

        Noise for each token would cost more than all the rest. Weights are integers, so their sums
        do not depend on the number of ranks.
        """
        values_RV = self._of_class(automata, sequence_R, class_R)
        peak_R = self.mesh.all_gather(values_RV.amax(1)).amax(0).nan_to_num(neginf=0.0)
        found, most = [], -(-automata.class_AV.shape[1] // self.mesh.size)
        rows = rows_at_a_time(values_RV, most)  # as many on each rank, whatever its slice
        parts = (part.split(rows) for part in (values_RV, peak_R, noise.uniform(*key)))
        for values, peak, unit in zip(*parts, strict=True):
            weight = values.sub_(peak.unsqueeze(1)).exp_().mul_(_PARTS)
            sums = weight.long().cumsum(1)
            total = sums[:, -1]
            sums_W = self.mesh.all_gather(total).cumsum(0)
            at = (unit * sums_W[-1]).long() - (sums_W[self.mesh.rank] - total)
            index = torch.searchsorted(sums, at.unsqueeze(1), right=True).squeeze(1)
            found.append(torch.where((at >= 0) & (at < total), index + self.start, 0))
        return self.mesh.all_reduce(torch.cat(found))

    def _of_class(self, automata: Automata, sequence_R: Tensor, class_R: Tensor) -> Tensor:
        which = self._classes(automata), automata.automaton_G[sequence_R]
        done = 0
        for values, classes in with_classes(self.values_RV, *which):
            own_R1 = class_R[done : (done := done + len(values))].unsqueeze(1)
            values.masked_fill_(classes != own_R1, -torch.inf)
        return self.values_RV

    def _classes(self, automata: Automata) -> Tensor:
        """Return the classes of this rank's ids."""
        return automata.class_AV[:, self.start : self.start + self.values_RV.shape[1]]

    def gather(self, ids_RK: Tensor) -> Tensor:
        """Return the logits of some ids of each row."""
        local, here = self.local(ids_RK)
        found = self.values_RV.gather(1, local)
        return self.mesh.all_reduce(torch.where(here, found, 0.0))

    def column(self, token_id: int) -> Tensor:
        """Return one token's logit in every row, or -inf for a negative id."""
        if token_id < 0:
            return torch.full_like(self.values_RV[:, 0], -torch.inf)
        column = token_id - self.start
        if 0 <= column < self.values_RV.shape[1]:
            return self.mesh.all_reduce(self.values_RV[:, column].clone())
        return self.mesh.all_reduce(self.values_RV.new_zeros(len(self.values_RV)))

    def best(self) -> tuple[Tensor, Tensor]:
        """Return each row's largest logit and its id; the lowest id on ties."""
        return self._best_of(self.values_RV)

    def top(self, rows: Items[slice], count: int) -> tuple[Tensor, Tensor]:
        """Return the largest logits of some rows and their ids, best first."""
        here = min(count, self.values_RV.shape[1])
        parts = [self.values_RV[part].topk(here) for part in rows]  # slices: nothing is copied
        values_QK = torch.cat([part.values for part in parts])
        ids_QK = torch.cat([part.indices for part in parts]) + self.start
        if self.mesh.size > 1:  # ranks may have slices of different sizes
            values_QK = pad(values_QK, (0, count - here), value=-torch.inf)
            ids_QK = pad(ids_QK, (0, count - here))
        values_WQK, ids_WQK = self.mesh.all_gather(values_QK), self.mesh.all_gather(ids_QK)
        values_QK, ids_QK = (
            values_WQK.transpose(0, 1).flatten(1),
            ids_WQK.transpose(0, 1).flatten(1),
        )
        best = values_QK.topk(min(count, values_QK.shape[1]))
        return best.values, ids_QK.gather(1, best.indices)

    def logsumexp(self) -> Tensor:
        """Return the log-sum-exp of each row over the whole vocabulary."""
        return self.mesh.all_gather(self.values_RV.logsumexp(-1)).logsumexp(0)

    def entropy(self) -> Tensor:
        """Return the entropy of each row, in nats."""
        logprobs_RV = self.values_RV - self.logsumexp().unsqueeze(1)
        terms_RV = (logprobs_RV.exp() * logprobs_RV).nan_to_num_(0.0)  # forbidden ids add 0
        return -self.mesh.all_reduce(terms_RV.sum(-1))

    def filtered(
        self,
        rows_Q: Tensor,
        temperature_Q: Tensor,
        top_k_Q: Tensor | None,
        top_p_Q: Tensor | None,
        min_p_Q: Tensor | None = None,
        left_out: float = torch.inf,
    ) -> "Logits":
        """Return the tempered logits of some rows, minus `left_out` where a filter drops an id.

        The order is min-p, top-k, top-p, as in vLLM; all ids that tie at a cut are kept.
        """
        own_QV, temperature_Q1 = self.values_RV[rows_Q], temperature_Q.unsqueeze(1)
        in_place = own_QV.dtype == temperature_Q1.dtype  # else the result is wider
        scores = tempered = own_QV.div_(temperature_Q1) if in_place else own_QV / temperature_Q1
        if min_p_Q is not None:
            peak = self.mesh.all_gather(scores.amax(-1)).amax(0)
            least = peak + min_p_Q.to(peak).log()  # 0 drops nothing
            scores = scores.masked_fill(scores < least.unsqueeze(1), -torch.inf)
        if top_k_Q is not None:
            each = torch.ones_like(scores, dtype=torch.long)
            scores = self._keep_top(
                scores, each, lambda count_Q: (count_Q - top_k_Q).where(top_k_Q > 0, -1)
            )
        if top_p_Q is not None:
            peak = self.mesh.all_gather(scores.amax(-1)).amax(0)
            mass = (torch.exp(scores - peak.unsqueeze(1)) * _PARTS).round().long()
            scores = self._keep_top(
                scores,
                mass,
                # However small top_p is, the best id stays.
                lambda all_Q: (all_Q - (top_p_Q * all_Q).ceil().long().clamp(min=1)).where(
                    top_p_Q < 1, -1
                ),
            )
        if left_out < torch.inf and scores is not tempered:
            scores = torch.where(scores == -torch.inf, tempered - left_out, scores)
        return Logits(scores, self.start, self.mesh)

    def draw(self, key: tuple[Tensor, Tensor, Tensor]) -> Tensor:
        """Draw an id for each row; `key` is its seed, position and step."""
        return self.noisy(key).best()[1]

    def noisy(self, key: tuple[Tensor, Tensor, Tensor]) -> "Logits":
        """Return the logits with Gumbel noise; the best of them is a draw."""
        made_RV, ids_1V = torch.empty_like(self.values_RV), self._ids_V.unsqueeze(0)
        rows = rows_at_a_time(made_RV)
        parts = (part.split(rows) for part in (made_RV, self.values_RV, *key))
        for made, values, seed, position, step in zip(*parts, strict=True):
            drawn = noise.gumbel(seed, position, step, ids_1V)
            torch.add(drawn.to(values), values, out=made)
        return Logits(made_RV, self.start, self.mesh)

    def local(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Return the columns of some ids on this rank, and which of the ids it holds."""
        last = self.values_RV.shape[1] - 1
        column = ids - self.start
        return column.clamp(0, last), (column >= 0) & (column <= last)

    def _best_of(self, scores_RV: Tensor) -> tuple[Tensor, Tensor]:
        value, index = scores_RV.max(-1)
        if self.mesh.size == 1:
            return value, index + self.start
        # Ranks are gathered in vocabulary order and max takes the first of equals: the lowest id.
        values_WR = self.mesh.all_gather(value)
        ids_WR = self.mesh.all_gather(index + self.start)
        value, rank = values_WR.max(0)
        return value, ids_WR.gather(0, rank.unsqueeze(0)).squeeze(0)

    def _keep_top(
        self, scores_QV: Tensor, weight_QV: Tensor, spare: Callable[[Tensor], Tensor]
    ) -> Tensor:
        """Forbid the lowest-scored ids whose total weight is within what `spare` allows.

        `spare` computes that from a row's total weight; if it is negative, all ids are kept.
        The cut is found digit by digit from histograms of the weights: three collectives, and no
        rank sorts or sees another's row. Weights are integers, so the sums do not depend on how
        the vocabulary is sharded.
        """
        order_QV = _in_order(scores_QV)
        cut_Q1 = torch.zeros_like(order_QV[:, :1])
        spare_Q1 = None
        shift = 32
        for bits in _DIGITS:
            shift -= bits
            digit_QV = (order_QV >> shift) & ((1 << bits) - 1)
            here_QB = weight_QV.new_zeros(len(weight_QV), 1 << bits)
            here_QB = self.mesh.all_reduce(here_QB.scatter_add_(1, digit_QV, weight_QV))
            up_to_QB = here_QB.cumsum(-1)
            if spare_Q1 is None:
                spare_Q1 = spare(up_to_QB[:, -1]).unsqueeze(1)
            below_QB = up_to_QB.sub_(here_QB)
            digit_Q1 = ((below_QB <= spare_Q1).sum(-1, keepdim=True) - 1).clamp_(min=0)
            spare_Q1 = spare_Q1 - below_QB.gather(1, digit_Q1)
            weight_QV = weight_QV.masked_fill(digit_QV != digit_Q1, 0)
            cut_Q1 = cut_Q1 | (digit_Q1 << shift)
        return scores_QV.masked_fill(order_QV < cut_Q1, -torch.inf)


def _in_order(scores: Tensor) -> Tensor:
    """Return 32-bit integers in the order of the scores as float32."""
    bits = (scores.float() + 0.0).view(torch.int32).long()  # minus zero becomes zero
    return torch.where(bits < 0, ~bits, bits + (1 << 31))
