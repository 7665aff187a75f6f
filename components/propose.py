"""From logits to proposals: one token, its confidence and its log-probability per position.

Letters: R rows of the head, Q rows that draw at random, E single logits to edit, B rows, L
positions of a block, K remembered or ranked ids.
"""

from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from diffray.components.block import Best, Block, Likely, Measures, Proposal, Top
from diffray.components.grammar.automata import Automata
from diffray.components.grammar.paths import LEFT_OUT, Entry, fill
from diffray.components.logits import Logits
from diffray.components.mesh import Mesh
from diffray.components.row_transform import Planned
from diffray.components.slot_values import Values
from diffray.components.transforms import LogitBias
from diffray.kernels.acceptance import RATHER_MASKED
from diffray.kernels.confidence import Confidence, Draw
from diffray.kernels.credit import Credits, remember
from diffray.kernels.noise import gumbel

_LIKELY = 16  # tokens that drafts are drawn from


class Draws(NamedTuple):
    """Rows that sample, and the parameters of their distributions."""

    rows_Q: Tensor
    temperature_Q: Tensor
    top_k_Q: Tensor | None  # None if no row asks for it
    top_p_Q: Tensor | None
    min_p_Q: Tensor | None = None

    @property
    def filtered(self) -> bool:
        return any(each is not None for each in (self.top_k_Q, self.top_p_Q, self.min_p_Q))


class SlotEnd(NamedTuple):
    """The end token in a slot of a pinned canvas, which marks an unused position."""

    end_id: int
    allowed: bool  # whether the slot is being measured


class Structured(NamedTuple):
    """Rows whose tokens are chosen together, so that automata accept the answers, or slots."""

    automata: Automata
    cells_GL: Tensor  # flat index into [B, L]; here L are the positions of a block or a slot
    entry: Entry
    rows_N: Tensor  # of the head
    places_N: Tensor  # flat index into [G, L]
    draws: Draws | None  # of these rows; None: the best tokens
    end: SlotEnd | None  # of slots
    following_N: Tensor  # the token after each row's slot


class Options(NamedTuple):
    """Rows of slots that are choices, and the tokens whose log-probabilities they report."""

    rows_E: Tensor
    ids_EK: Tensor


@dataclass(frozen=True, slots=True)
class Rows:
    """Which positions the head's rows are about, and how their tokens are chosen."""

    cells_R: Tensor  # flat index into [B, L]
    draws: Draws | None  # of rows that choose independently
    measured: Draws | None  # rows whose distributions are measured; greedy ones at temperature 1
    transforms: tuple[Planned, ...]  # of the logits, in their order
    doubted: LogitBias | None  # tokens without confidence, as -inf to add to their logits
    ranked: tuple[slice, ...]  # rows whose most probable ids are reported ...
    num_ranked: int  # ... and how many of them
    structured: tuple[Structured, ...] = ()
    options: Options | None = None
    values: Values | None = None
    redraws: bool = False  # whether drafts are made of rows that sample
    keeps_best: bool = False  # whether the most probable tokens are returned, whatever is drawn

    @property
    def plain(self) -> bool:
        """Whether no row needs the logits themselves."""
        filtered = self.draws is not None and self.draws.filtered
        needs = self.structured, self.measured, self.transforms, self.doubted, self.ranked
        return not (filtered or self.redraws or any(needs))

    def draw(self, block: Block) -> Draw | None:
        """Return how each row draws at this step, or None if no row does."""
        if self.draws is None:
            return None
        row_R = self.cells_R // block.ids_BL.shape[1]
        cold_R = self.draws.temperature_Q.new_zeros(len(row_R))
        return Draw(
            cold_R.index_copy(0, self.draws.rows_Q, self.draws.temperature_Q),
            block.seed_B[row_R],
            block.positions_BL.flatten()[self.cells_R],
            block.step_B[row_R],
        )


def propose(
    logits: Logits, rows: Rows, block: Block, credits: Credits | None, mask_token_id: int
) -> Proposal:
    """Choose a token for every head row from its transformed logits, which are changed in place."""
    if credits is not None:
        top_R, top_ids_R = logits.best()
        logprob_R = top_R - logits.logsumexp()
        about = rows.cells_R, block.masked_BL
        ids_RK, values_RK = remember(credits, *about, top_ids_R, logprob_R)
        rows_RK = torch.arange(len(ids_RK), device=ids_RK.device).unsqueeze(1).expand_as(ids_RK)
        logits.add(rows_RK, ids_RK.clamp(min=0), values_RK)
    lse_R = logits.logsumexp()
    mask_logit_R = logits.column(mask_token_id)
    measured = None if rows.measured is None else logits.filtered(*rows.measured)
    logits.forbid(mask_token_id)
    best_R, ids_R = logits.best()
    top = _rank(logits, rows, lse_R) if rows.ranked else None
    options_EK = None
    if rows.options is not None:
        rows_E, ids_EK = rows.options
        options_EK = logits.some(rows_E).gather(ids_EK) - lse_R[rows_E].unsqueeze(1)
    chosen_R, likely, best = best_R, None, None
    if rows.keeps_best:
        zero_BL = lse_R.new_zeros(block.ids_BL.shape)
        logprob_BL = _spread(best_R - lse_R, rows.cells_R, zero_BL)
        best = Best(_spread(ids_R, rows.cells_R, block.ids_BL), logprob_BL)
    if rows.draws is not None:
        key = _key(rows.cells_R[rows.draws.rows_Q], block)
        tempered = logits.filtered(*rows.draws)
        ids_R = ids_R.index_copy(0, rows.draws.rows_Q, tempered.draw(key))
        if rows.redraws:
            likely = _likely(logits, tempered, rows.draws.rows_Q, rows.cells_R, lse_R, block)
    for structured in rows.structured:
        ids_R = ids_R.index_copy(
            0,
            structured.rows_N,
            _choose_together(logits, structured, rows, block, ids_R, mask_token_id),
        )
    if rows.draws is not None or rows.structured:
        chosen_R = logits.gather(ids_R.unsqueeze(1)).squeeze(1)
    logprob_R, prefers_mask_R = chosen_R - lse_R, mask_logit_R > best_R
    confidence_R = logprob_R.exp()
    if rows.doubted is not None:
        rows.doubted.add_to(logits)
        others_R = torch.logaddexp(logits.logsumexp(), mask_logit_R)
        own_R = logits.gather(ids_R.unsqueeze(1)).squeeze(1)
        confidence_R = (own_R - others_R).exp().nan_to_num(0.0)  # where no others are allowed
    proposal = _proposal(ids_R, logprob_R, confidence_R, prefers_mask_R, rows.cells_R, block, top)
    value_BL = None
    if rows.values is not None:
        value_E = rows.values.probability(logits, lse_R, ids_R)
        nowhere_BL = value_E.new_full(block.ids_BL.shape, -torch.inf)
        value_BL = _spread(value_E, rows.cells_R[rows.values.rows_E], nowhere_BL)
    proposal = replace(proposal, options_EK=options_EK, likely=likely, best=best, value_BL=value_BL)
    if measured is None or rows.measured is None:
        return proposal
    rows_Q = rows.measured.rows_Q
    return replace(
        proposal, measures=_measure(measured, ids_R[rows_Q], rows.cells_R[rows_Q], block)
    )


def _likely(
    logits: Logits, tempered: Logits, rows_Q: Tensor, cells_R: Tensor, lse_R: Tensor, block: Block
) -> Likely:
    """Return the most probable tokens of rows that sample, at their positions."""
    scores_QK, ids_QK = tempered.top((slice(None),), _LIKELY)
    ids_RK = ids_QK.new_zeros(len(lse_R), ids_QK.shape[1]).index_copy(0, rows_Q, ids_QK)
    logprobs_QK = (logits.gather(ids_RK) - lse_R.unsqueeze(1))[rows_Q]
    cells_Q, shape = cells_R[rows_Q], (*block.ids_BL.shape, ids_QK.shape[1])

    def spread(values_QK: Tensor, elsewhere: float) -> Tensor:
        all_BLK = values_QK.new_full(shape, elsewhere)
        all_BLK.view(-1, shape[-1])[cells_Q] = values_QK
        return all_BLK

    return Likely(spread(ids_QK, 0), spread(scores_QK, -torch.inf), spread(logprobs_QK, 0.0))


def _key(cells_Q: Tensor, block: Block) -> tuple[Tensor, Tensor, Tensor]:
    """Return the seed, position and step of some cells, on which their noise depends."""
    row_Q = cells_Q // block.ids_BL.shape[1]
    return block.seed_B[row_Q], block.positions_BL.flatten()[cells_Q], block.step_B[row_Q]


def _choose_together(
    logits: Logits, group: Structured, rows: Rows, block: Block, ids_R: Tensor, mask_token_id: int
) -> Tensor:
    """Return the tokens of a group's rows; outside the answer, keep those chosen before."""
    automata, entry, key = group.automata, group.entry, None
    ids_GL = block.ids_BL.flatten()[group.cells_GL]
    sequence_N = group.places_N // ids_GL.shape[1]
    if group.draws is None:
        own, mass_NC = logits.some(group.rows_N), None
        _weigh_ends(own, group)
        score_NC = own.of_classes(automata, sequence_N, drawn=False)
    else:
        key = _key(rows.cells_R[group.rows_N], block)
        # In the logits' precision: float64 takes twice as long.
        temperature_Q = group.draws.temperature_Q.to(logits.values_RV)
        draws = group.draws._replace(temperature_Q=temperature_Q)
        own = logits.filtered(*draws, left_out=LEFT_OUT)
        _weigh_ends(own, group)
        # Sums over a block, in which filters leave -1e4 a position: float32 would not be exact.
        mass_NC = own.of_classes(automata, sequence_N, drawn=True).double()
        score_NC = mass_NC + _noise_of_classes(automata, key)
    fixed_GL = (ids_GL != mask_token_id) & entry.valid_GL
    class_GL = automata.class_AV[automata.automaton_G.unsqueeze(1), ids_GL]

    def spread(values_NC: Tensor) -> Tensor:
        """Write the rows' values at their places; a decided place allows only its token."""
        size = *fixed_GL.shape, values_NC.shape[1]
        found_GLC = values_NC.new_zeros(size).flatten(0, 1).index_copy(0, group.places_N, values_NC)
        classes_C = torch.arange(size[-1], device=values_NC.device)
        own_GLC = class_GL.unsqueeze(-1) == classes_C
        return (
            found_GLC.view(size)
            .masked_fill(fixed_GL.unsqueeze(-1), 0.0)
            .masked_fill(fixed_GL.unsqueeze(-1) & ~own_GLC, -torch.inf)
        )

    mass_GLC = None if mass_NC is None else spread(mass_NC)
    places_N = group.places_N
    class_N = fill(spread(score_NC), mass_GLC, automata, entry).flatten()[places_N]
    if key is None:
        found_N = own.best_in(automata, sequence_N, class_N)
    else:
        found_N = own.draw_in(automata, sequence_N, class_N, key)
    found_N = torch.where(entry.valid_GL.flatten()[places_N], found_N, ids_R[group.rows_N])
    return torch.where(fixed_GL.flatten()[places_N], ids_GL.flatten()[places_N], found_N)


def _noise_of_classes(automata: Automata, key: tuple[Tensor, Tensor, Tensor]) -> Tensor:
    """Return Gumbel noise for whole classes, from ids beyond the vocabulary.

    The maximum of a class's tokens with noise is distributed like the class's mass with noise, and
    is independent of which token attains it: so classes can be drawn first, then tokens.
    """
    first, device = automata.class_AV.shape[1], automata.class_AV.device
    ids_C = torch.arange(first, first + automata.num_classes, device=device)
    return gumbel(*key, ids_C.unsqueeze(0))


def _weigh_ends(logits: Logits, group: Structured) -> None:
    """Set the logits of the end token in slots, in place.

    A value's end is as probable as the token after the slot is at that position. Unused positions
    after it must not count, wherever the end is: so each end token is worth the difference to the
    next position's.
    """
    if group.end is None:
        return
    end_id, allowed = group.end
    if not allowed:
        logits.put(end_id, torch.full_like(logits.values_RV[:, 0], -torch.inf))
        return
    logits.values_RV.sub_(logits.logsumexp().unsqueeze(1))
    after_N = logits.gather(group.following_N.unsqueeze(1)).squeeze(1).clamp(min=-LEFT_OUT)
    after_GL = after_N.new_zeros(group.cells_GL.shape)
    after_GL.view(-1)[group.places_N] = after_N
    worth_GL = after_GL - torch.nn.functional.pad(after_GL, (0, 1))[:, 1:]
    logits.put(end_id, worth_GL.flatten()[group.places_N])


def propose_plain(found: Confidence, rows: Rows, block: Block) -> Proposal:
    """Make proposals from the ranks' joined choices, without any other logits than the mask's."""
    logprob_R = found.logits_R - found.logsumexp_R
    prefers_mask_R = found.gathered_RK[:, 0] > found.best_R
    return _proposal(
        found.ids_R, logprob_R, logprob_R.exp(), prefers_mask_R, rows.cells_R, block, None
    )


def joined(found: Confidence, mesh: Mesh) -> Confidence:
    """Join the ranks' choices from their slices of the vocabulary."""
    if mesh.size == 1:
        return found
    # One collective for all: each costs more than its bytes. Ids are exact in float32 up to 2**24.
    _, scores_R, logits_R, best_R, logsumexp_R, gathered_RK = found
    ids_R = found.ids_R.to(scores_R.dtype)
    parts_5R = torch.stack([ids_R, scores_R, logits_R, best_R, logsumexp_R])
    packed_WPR = mesh.all_gather(torch.cat([parts_5R, gathered_RK.T]))
    ids_WR, scores_WR, logits_WR, best_WR, logsumexp_WR = packed_WPR[:, :5].unbind(1)
    # Ranks stand in vocabulary order and max takes the first of equals: the lowest id.
    scores_1R, winner_1R = scores_WR.max(0, keepdim=True)
    return Confidence(
        ids_WR.gather(0, winner_1R).squeeze(0).long(),
        scores_1R.squeeze(0),
        logits_WR.gather(0, winner_1R).squeeze(0),
        best_WR.amax(0),
        logsumexp_WR.logsumexp(0),
        packed_WPR[:, 5:].sum(0).T,  # an id's logit is 0 on all ranks but one
    )


def _proposal(
    ids_R: Tensor,
    logprob_R: Tensor,
    confidence_R: Tensor,
    prefers_mask_R: Tensor,
    cells_R: Tensor,
    block: Block,
    top: Top | None,
) -> Proposal:
    confidence_R = confidence_R + torch.where(prefers_mask_R, RATHER_MASKED, 0.0)
    return Proposal(
        _spread(ids_R, cells_R, block.ids_BL),
        _spread(confidence_R, cells_R, logprob_R.new_full(block.ids_BL.shape, -torch.inf)),
        _spread(logprob_R, cells_R, logprob_R.new_zeros(block.ids_BL.shape)),
        top,
    )


def _measure(logits: Logits, ids_Q: Tensor, cells_Q: Tensor, block: Block) -> Measures:
    lse_Q = logits.logsumexp()
    probability_Q = (logits.gather(ids_Q.unsqueeze(1)).squeeze(1) - lse_Q).exp()
    best_Q2 = (logits.top((slice(None),), 2)[0] - lse_Q.unsqueeze(1)).exp()
    zero_BL = lse_Q.new_zeros(block.ids_BL.shape)
    found = probability_Q, best_Q2[:, 0] - best_Q2[:, 1], logits.entropy()
    return Measures(*(_spread(part_Q, cells_Q, zero_BL) for part_Q in found))


def _rank(logits: Logits, rows: Rows, lse_R: Tensor) -> Top:
    """Return the most probable ids of rows that report them, from the logits of the proposals.

    The mask token is not among them, as it is never proposed.
    """
    values_QK, ids_QK = logits.top(rows.ranked, rows.num_ranked)
    cells_Q, lse_Q = (torch.cat([x[part] for part in rows.ranked]) for x in (rows.cells_R, lse_R))
    return Top(cells_Q, ids_QK, values_QK - lse_Q.unsqueeze(1))


def _spread(values_R: Tensor, cells_R: Tensor, onto_BL: Tensor) -> Tensor:
    """Return `onto_BL` with the rows' values written at their cells."""
    return onto_BL.flatten().scatter(0, cells_R, values_R).view_as(onto_BL)
