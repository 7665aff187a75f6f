"""The current blocks on the device: their contents, and which rows are done.

Letters: B rows (sequences that denoise, then their copies), L positions of the longest block, G
rows that share a decoder, or are guided.
"""

from collections import defaultdict
from collections.abc import Sequence as Items
from typing import NamedTuple

import torch
from torch import Tensor

from diffray.components.backend import send
from diffray.components.block import Block, Plan, Proposal
from diffray.components.decoder import Decoder
from diffray.components.sequence import Sequence
from diffray.kernels.acceptance import LONGEST, Progress, Rules, best_where_none
from diffray.kernels.choose import TORCH, Kernels
from diffray.kernels.confidence import Confidence
from diffray.workers.features.feature import Acceptance, Feature, copy_canvases, rows_of
from diffray.workers.outcome import Outcome, copy_outcomes
from diffray.workers.slots import Slots


class DecoderGroup(NamedTuple):
    """The rows of a round that share a decoder."""

    decoder: Decoder
    members: list[int]  # the same rows, on the host
    rows_G: Tensor


class Places(NamedTuple):
    """Where the rows' blocks are, and what else of them does not change."""

    positions_BL: Tensor
    inside_BL: Tensor  # without padding
    cells_BL: Tensor  # on all canvases; of padding, one that is never read
    length_B: Tensor
    seed_B: Tensor
    before_B: Tensor  # steps of the blocks before
    drawn_once_B: Tensor  # whether each position is drawn once, whatever the step
    index_B: Tensor  # the block's number among those added to the canvas together ...
    count_B: Tensor  # ... and how many these are


class BatchState:
    """One row per sequence and per copy, valid until the block of any sequence changes."""

    def __init__(
        self,
        sequences: Items[Sequence],
        slots: Slots,
        features: Items[Feature],
        kernels: Kernels = TORCH,
    ) -> None:
        self.kernels = kernels
        self.sequences, self.slots, self.device = sequences, slots, slots.device
        self.lengths = [s.block.length for s in sequences]
        self.length = max(self.lengths)
        self.rows = rows_of(sequences)
        copy_canvases(self.rows, slots)
        self._floors: list[float] = []
        self._shares = [row.sequence.policy.decoder.shares(row.sequence) for row in self.rows]
        self.places, self.steps_B, self.post_steps_B = self._placed()
        self.features = features
        for feature in features:
            feature.begin(self)
        self.ids_BL = self._cells(slots.ids_SN)
        self.masked_BL = self._cells(slots.masked_SN) & self.places.inside_BL
        self.steps_BL = self._cells(slots.steps_SN)
        self.logprobs_BL = self._cells(slots.logprobs_SN)
        self.done_B = torch.zeros_like(self.steps_B, dtype=torch.bool)
        self.foreseen_B = self.done_B
        self.groups = self._plan_groups()
        self._none_BL = torch.zeros_like(self.masked_BL)
        self.rules = self._find_rules()

    def _placed(self) -> tuple[Places, Tensor, Tensor]:
        """Return the rows' places, and how many steps and post-steps were before."""
        numbers = [
            (
                s.block.start,
                s.block.stop,
                row.slot * self.slots.length,
                s.seed,
                s.steps_before,
                s.policy.iteration.next_token,
                row.step,
                *s.canvas.place_of(s.block.index),
                s.block.post_steps,
            )
            for row in self.rows
            for s in (row.sequence,)
        ]
        # In one copy to the device; each row is contiguous.
        facts_B = send(torch.tensor(numbers).T.contiguous(), self.device)
        start_B, stop_B, base_B, seed_B, before_B, once_B, steps_B, *others = facts_B
        index_B, count_B, post_steps_B = others
        positions_BL = start_B.unsqueeze(1) + torch.arange(self.length, device=self.device)
        inside_BL = positions_BL < stop_B.unsqueeze(1)
        cells_BL = (base_B.unsqueeze(1) + positions_BL).where(inside_BL, self.slots.trash)
        length_B = stop_B - start_B
        blocks = positions_BL, inside_BL, cells_BL, length_B
        places = Places(*blocks, seed_B, before_B, once_B.bool(), index_B, count_B)
        return places, steps_B, post_steps_B

    def now(self, step: int, first_only: Items[bool]) -> Block:
        """Return what decoders see at the `step`-th step of a round.

        Of a row that is `first_only` they see only the first position of its block.
        """
        floors = [
            row.sequence.policy.iteration.floor(row.sequence.steps_before + row.step + step)
            for row in self.rows
        ]
        if floors != self._floors:
            self._floors = floors
            self._floor_B = send(torch.tensor(floors, dtype=torch.float64), self.device)
        masked_BL = self.masked_BL  # rows that are done have none
        if any(first_only):
            later_L = torch.arange(self.length, device=self.device) > 0
            first_only_B = send(torch.tensor(first_only), self.device)
            masked_BL = masked_BL & ~(first_only_B.unsqueeze(1) & later_L)
        step_B = self.places.before_B + self.steps_B
        block = Block(
            ids_BL=self.ids_BL,
            masked_BL=masked_BL,
            editable_BL=self._none_BL,
            positions_BL=self.places.positions_BL,
            seed_B=self.places.seed_B,
            step_B=step_B,
            draw_step_B=step_B.masked_fill(self.places.drawn_once_B, 0),
            step_in_block_B=self.steps_B,
            length_B=self.places.length_B,
            index_B=self.places.index_B,
            count_B=self.places.count_B,
            floor_B=self._floor_B,
            plans=self._plans(step),
        )
        return self.shown(block)

    def shown(self, block: Block) -> Block:
        """Return the block as decoders may see it."""
        for feature in self.features:
            block = feature.show(self, block)
        return block

    def accept(self, proposal: Proposal, block: Block) -> None:
        """Make accepted tokens final, and determine which rows are done."""
        step = Acceptance(proposal, block, self._none_BL, self.masked_BL)
        for feature in self.features:
            feature.propose(self, step)
        step.masked_BL = self.masked_BL
        step.accepted_BL = self.choose(step.proposal, step.block)
        for feature in self.features:
            feature.accept(self, step)
        self._apply(step)
        for feature in self.features:
            feature.after(self, step)
        self.put(self.slots.ids_SN, self.ids_BL)
        self.put(self.slots.masked_SN, self.masked_BL)
        for feature in self.features:
            feature.written(self, step)
        done_B = ~self.masked_BL.any(-1)
        for feature in self.features:
            done_B = feature.done(self, step, done_B)
        self.done_B = self.done_B | done_B

    def _apply(self, step: Acceptance) -> None:
        proposal, accepted_BL = step.proposal, step.accepted_BL
        self.ids_BL = torch.where(accepted_BL, proposal.ids_BL, self.ids_BL)
        self.masked_BL = self.masked_BL & ~accepted_BL
        self.steps_BL = torch.where(accepted_BL, step.block.step_B.unsqueeze(1), self.steps_BL)
        self.logprobs_BL = torch.where(accepted_BL, proposal.logprob_BL.float(), self.logprobs_BL)
        self.steps_B = self.steps_B + ~self.done_B

    def settle(self, found: Confidence, cells_R: Tensor, block: Block) -> None:
        """Do the same as `accept` in one kernel; possible if `rules` is not None."""
        assert self.rules is not None, "the rows' decoders have no rules"
        heads_BL = torch.full_like(self.ids_BL, -1)
        heads_BL.view(-1)[cells_R] = torch.arange(len(cells_R), device=self.device)
        progress = Progress(
            self.ids_BL,
            self.masked_BL,
            self.steps_BL,
            self.logprobs_BL,
            self.steps_B,
            self.done_B,
            self.places.before_B,
            self.places.length_B,
            self.places.cells_BL,
        )
        canvases = self.slots.ids_SN.view(-1), self.slots.masked_SN.view(-1)
        self.kernels.settle(found, heads_BL, block.masked_BL, self.rules, progress, *canvases)

    def outcomes(self) -> list[Outcome]:
        """Copy the outcome to the host: the only place where a round waits for the device."""
        flags = self.done_B.long(), self.foreseen_B.long()
        counts_B4 = torch.stack([self.steps_B, self.post_steps_B, *flags], dim=1)
        own = slice(len(self.sequences))
        found = copy_outcomes(
            self.lengths,
            self.ids_BL[own],
            self.masked_BL[own],
            self.steps_BL[own],
            self.logprobs_BL[own],
            counts_B4[own],
        )
        for feature in self.features:
            feature.report(found)
        return found

    def keep(self) -> None:
        """Save the state of unfinished blocks in their sequences, for the next plan."""
        self.put(self.slots.steps_SN, self.steps_BL)
        self.put(self.slots.logprobs_SN, self.logprobs_BL)
        for feature in self.features:
            feature.keep(self)

    def choose(self, proposal: Proposal, block: Block) -> Tensor:
        """Return what decoders accept, and the best masked position in rows that accept none."""
        accepted_BL = self._accept(proposal, block) & (block.masked_BL | block.editable_BL)
        confidence_BL = proposal.confidence_BL
        return accepted_BL | best_where_none(confidence_BL, block.masked_BL, accepted_BL)

    def _accept(self, proposal: Proposal, block: Block) -> Tensor:
        """Ask each group's decoder about its rows."""
        if len(self.groups) == 1:  # no rows to select
            return self.groups[0].decoder.accept(proposal, block)
        accepted_BL = torch.zeros_like(self.masked_BL)
        for group in self.groups:
            ours = proposal.rows(group.rows_G), block.rows(group.rows_G, group.members)
            accepted_BL[group.rows_G] = group.decoder.accept(*ours)
        return accepted_BL

    def _plans(self, step: int) -> tuple[Plan, ...]:
        """Return what is planned for the `step`-th step of a round; nothing once a row is done."""
        if not any(self._shares):
            return ()
        found = []
        for row, shares in zip(self.rows, self._shares, strict=True):
            at, block = row.step + step, row.sequence.block
            # A pinned block's first step may have measured it, and decided nothing.
            share = shares[at] if at < len(shares) else block.length
            found.append(Plan(block.start, block.stop, share))
        return tuple(found)

    def _find_rules(self) -> Rules | None:
        """Return the rows' acceptance rules, if accepting is all that a step does to them."""
        fused = all(feature.fused for feature in self.features)
        if self.kernels.name == TORCH.name or self.length > LONGEST or not fused:
            return None
        found = []
        for sequence in self.sequences:
            rule = sequence.policy.decoder.rule(sequence)
            if rule is None:
                return None
            found.append(rule)
        kind, least, steps = zip(*found, strict=True)
        numbers_2B = send(torch.tensor([kind, steps]), self.device)
        least_B = send(torch.tensor(least, dtype=torch.float64), self.device)
        return Rules(numbers_2B[0], least_B, numbers_2B[1])

    def _plan_groups(self) -> list[DecoderGroup]:
        rows: dict[Decoder, list[int]] = defaultdict(list)
        for b, row in enumerate(self.rows):
            rows[row.sequence.policy.decoder].append(b)
        return [
            DecoderGroup(decoder, members, send(torch.tensor(members), self.device))
            for decoder, members in rows.items()
        ]

    def _cells(self, state_SN: Tensor) -> Tensor:
        return (
            state_SN.view(-1)
            .index_select(0, self.places.cells_BL.view(-1))
            .view_as(self.places.cells_BL)
        )

    def put(self, state_SN: Tensor, block_BL: Tensor, cells_BL: Tensor | None = None) -> None:
        cells_BL = self.places.cells_BL if cells_BL is None else cells_BL
        state_SN.view(-1).index_copy_(0, cells_BL.view(-1), block_BL.view(-1))
