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
from diffray.components.config import LARGEST
from diffray.components.decoder import Decoder
from diffray.components.sequence import Sequence
from diffray.kernels.acceptance import LONGEST, Progress, Rules, best_where_none
from diffray.kernels.choose import TORCH, Kernels
from diffray.kernels.confidence import Confidence
from diffray.workers.branching import branches_of, make_branches, take_best
from diffray.workers.credits import credits_of, keep_credits
from diffray.workers.outcome import Outcome, copy_outcomes
from diffray.workers.renoised_rows import RenoisedRows
from diffray.workers.slots import Slots
from diffray.workers.top_tokens import TopTokens
from diffray.workers.verification import links_of, make_drafts, rows_of, take_over


class DecoderGroup(NamedTuple):
    """The rows of a round that share a decoder."""

    decoder: Decoder
    members: list[int]  # the same rows, on the host
    rows_G: Tensor


class BatchState:
    """One row per sequence and per copy, valid until the block of any sequence changes."""

    def __init__(self, sequences: Items[Sequence], slots: Slots, kernels: Kernels = TORCH) -> None:
        self.kernels = kernels
        self.sequences, self.slots, self.device = sequences, slots, slots.device
        self.lengths = [s.stop - s.start for s in sequences]
        self.length = max(self.lengths)
        self.edits = any(s.policy.decoder.edits for s in sequences)
        self.rows = rows_of(sequences)
        self.links = links_of(self.rows, slots)
        self.branches = branches_of(self.rows, slots.device)
        self._floors: list[float] = []
        self._measures = [s.measures for s in sequences]
        self._shares = [row.sequence.policy.decoder.shares(row.sequence) for row in self.rows]
        start_B, stop_B, base_B, ours_B, self.seed_B, self.before_B, *rest = self._numbers()
        self.steps_B, self.index_B, self.count_B, self.settle_B, self.settled_B, self.last_B = rest
        self.positions_BL = start_B.unsqueeze(1) + torch.arange(self.length, device=self.device)
        self.length_B = stop_B - start_B
        inside_BL = self.positions_BL < stop_B.unsqueeze(1)
        cells_BL = base_B.unsqueeze(1) + self.positions_BL
        self.cells_BL = torch.where(inside_BL, cells_BL, slots.trash)
        self.ours_BL = inside_BL & (self.positions_BL >= ours_B.unsqueeze(1))
        self._place_unconditional(inside_BL)
        self.ids_BL = self._cells(slots.ids_SN)
        self.masked_BL = self._cells(slots.masked_SN) & inside_BL
        self.steps_BL = self._cells(slots.steps_SN)
        self.logprobs_BL = self._cells(slots.logprobs_SN)
        self.done_B = torch.zeros_like(self.steps_B, dtype=torch.bool)
        self.foreseen_B = self.done_B
        self.options_EK: Tensor | None = None  # of the last step, for pinned canvases
        self.groups = self._plan_groups()
        self.credits = credits_of(self.rows, self.length, self.device)
        self.sub_BL = self._sub_blocks()
        self.top_tokens = TopTokens(sequences, self.length, self.device)
        self.renoised: RenoisedRows | None = None
        if any(s.policy.iteration.renoises for s in sequences):
            self.renoised = RenoisedRows(sequences, slots, self.positions_BL)
        self.rules = self._find_rules()

    def _numbers(self) -> Tensor:
        """Return twelve numbers of each row, [12, B], in one copy to the device."""
        numbers = [
            (
                s.start,
                s.stop,
                row.slot * self.slots.length,
                # An editing decoder may replace tokens from here on.
                s.prompt_len if s.policy.decoder.edits else s.stop,
                s.seed,
                s.steps_before,
                s.step + row.ahead,
                s.index_in_canvas,
                s.blocks_in_canvas,
                s.most_post_steps,
                s.post_steps,
                s.policy.decoder.last_step() or LARGEST,
            )
            for row in self.rows
            for s in (row.sequence,)
        ]
        return send(torch.tensor(numbers).T.contiguous(), self.device)  # each row contiguous

    def _sub_blocks(self) -> Tensor | None:
        """Return the number of each position's sub-block, [B, L]; None if no row has any.

        Rows without sub-blocks count as one that is as long as the longest block.
        """
        sizes = [row.sequence.policy.iteration.sub_block() for row in self.rows]
        if not any(sizes):
            return None
        size_B = send(torch.tensor([size or self.length for size in sizes]), self.device)
        return torch.arange(self.length, device=self.device) // size_B.unsqueeze(1)

    def now(self, step: int, first_only: Items[bool]) -> Block:
        """Return what decoders see at the `step`-th step of a round.

        Of a row that is `first_only` they see only the first position of its block.
        """
        floors = [
            s.policy.iteration.floor(s.steps_before + s.step + ahead + step)
            for s, _, ahead in self.rows
        ]
        if floors != self._floors:
            self._floors = floors
            self._floor_B = send(torch.tensor(floors, dtype=torch.float64), self.device)
        masked_BL = self.first_masks(self.masked_BL)  # rows that are done have none
        if any(first_only):
            later_L = torch.arange(self.length, device=self.device) > 0
            first_only_B = send(torch.tensor(first_only), self.device)
            masked_BL = masked_BL & ~(first_only_B.unsqueeze(1) & later_L)
        editable_BL = self.ours_BL  # empty, unless a decoder edits
        if self.edits:
            editable_BL = self.ours_BL & ~self.masked_BL & ~self.done_B.unsqueeze(1)
        return Block(
            ids_BL=self.ids_BL,
            masked_BL=masked_BL,
            editable_BL=editable_BL,
            positions_BL=self.positions_BL,
            seed_B=self.seed_B,
            step_B=self.before_B + self.steps_B,
            step_in_block_B=self.steps_B,
            length_B=self.length_B,
            index_B=self.index_B,
            count_B=self.count_B,
            floor_B=self._floor_B,
            plans=self._plans(step),
        )

    def first_masks(self, masked_BL: Tensor) -> Tensor:
        """Return the masks of each row's first sub-block that has any."""
        if self.sub_BL is None:
            return masked_BL
        first_B1 = masked_BL.int().argmax(1, keepdim=True)
        return masked_BL & (self.sub_BL == self.sub_BL.gather(1, first_B1))

    def accept(self, proposal: Proposal, block: Block) -> None:
        """Make accepted tokens final, and determine which rows are done."""
        if self.branches is not None:
            proposal, block = take_best(self, proposal, block)
        accepted_BL, masked_BL = self.choose(proposal, block), self.masked_BL
        if any(self._measures):
            accepted_BL = self._measure(proposal, accepted_BL)
        if self.renoised is not None:
            proposal, accepted_BL = self.renoised.settle(self, proposal, block, accepted_BL)
        self.ids_BL = torch.where(accepted_BL, proposal.ids_BL, self.ids_BL)
        self.masked_BL = self.masked_BL & ~accepted_BL
        self.steps_BL = torch.where(accepted_BL, block.step_B.unsqueeze(1), self.steps_BL)
        self.logprobs_BL = torch.where(accepted_BL, proposal.logprob_BL.float(), self.logprobs_BL)
        active_B = ~self.done_B
        self.steps_B = self.steps_B + active_B
        if self.links:
            last_B = take_over(self, proposal, block, masked_BL, accepted_BL)
            make_drafts(self, proposal, block, last_B)
        if self.branches is not None:
            make_branches(self, proposal, block)
        self._put(self.slots.ids_SN, self.ids_BL)
        if len(self.uncond_rows_G):
            uncond_ids_GL = self.ids_BL[self.uncond_rows_G]
            self._put(self.slots.ids_SN, uncond_ids_GL, self.uncond_cells_GL)
        self._put(self.slots.masked_SN, self.masked_BL)
        self.options_EK = proposal.options_EK
        if proposal.top is not None:
            self.top_tokens.write(proposal.top, accepted_BL)

        empty_B = ~self.masked_BL.any(-1)
        if self.edits:
            masked_B = block.masked_BL.any(-1)
            self.settled_B = self.settled_B + (active_B & ~masked_B)
            settled_B = (self.settled_B >= self.settle_B) | (
                masked_B & (self.steps_B >= self.last_B)
            )
            empty_B &= ~accepted_BL.any(-1) | settled_B
        self.done_B = self.done_B | empty_B

    def settle(self, found: Confidence, cells_R: Tensor, block: Block) -> None:
        """Do the same as `accept` in one kernel; possible if `rules` is not None."""
        assert self.rules is not None, "the rows' decoders have no rules"
        self.options_EK = None
        heads_BL = torch.full_like(self.ids_BL, -1)
        heads_BL.view(-1)[cells_R] = torch.arange(len(cells_R), device=self.device)
        progress = Progress(
            self.ids_BL,
            self.masked_BL,
            self.steps_BL,
            self.logprobs_BL,
            self.steps_B,
            self.done_B,
            self.before_B,
            self.length_B,
            self.cells_BL,
        )
        canvases = self.slots.ids_SN.view(-1), self.slots.masked_SN.view(-1)
        self.kernels.settle(found, heads_BL, block.masked_BL, self.rules, progress, *canvases)

    def outcomes(self) -> list[Outcome]:
        """Copy the outcome to the host: the only place where a round waits for the device."""
        flags = self.done_B.long(), self.foreseen_B.long()
        counts_B4 = torch.stack([self.steps_B, self.settled_B, *flags], dim=1)
        own = slice(len(self.sequences))
        return copy_outcomes(
            self.lengths,
            self.ids_BL[own],
            self.masked_BL[own],
            self.steps_BL[own],
            self.logprobs_BL[own],
            counts_B4[own],
            self.top_tokens.rankings(),
        )

    def keep(self) -> None:
        """Save the state of unfinished blocks in their sequences, for the next plan."""
        self._put(self.slots.steps_SN, self.steps_BL)
        self._put(self.slots.logprobs_SN, self.logprobs_BL)
        self.top_tokens.keep()
        if self.renoised is not None:
            self.renoised.keep()
        if self.credits is not None:
            keep_credits(self.credits, self.sequences)

    def choose(self, proposal: Proposal, block: Block) -> Tensor:
        """Return what decoders accept, and the best masked position in rows that accept none."""
        open_BL = block.masked_BL | block.editable_BL if self.edits else block.masked_BL
        accepted_BL = self._accept(proposal, block) & open_BL
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

    def _measure(self, proposal: Proposal, accepted_BL: Tensor) -> Tensor:
        """Accept the unused positions of pinned canvases that are measured.

        In rows that have any, only decoders of whole slots may accept more.
        """
        ends = [
            -1 if s.pins is None or not measures else s.pins.canvas.end_id
            for s, measures in zip(self.sequences, self._measures, strict=True)
        ]
        ends += [-1] * (len(self.rows) - len(ends))  # no drafts of pinned canvases
        end_B1 = send(torch.tensor(ends), self.device).unsqueeze(1)
        unused_BL: Tensor = (proposal.ids_BL == end_B1) & self.masked_BL
        whole = [row.sequence.policy.decoder.whole_slots for row in self.rows]
        whole_B1 = send(torch.tensor(whole), self.device).unsqueeze(1)
        # If all are used, the next step would see the same canvas, so there is no need to wait.
        others_B1 = whole_B1 | ~unused_BL.any(-1, keepdim=True)
        return unused_BL | (accepted_BL & others_B1)

    def _plans(self, step: int) -> tuple[Plan, ...]:
        """Return what is planned for the `step`-th step of a round; nothing once a row is done."""
        if not any(self._shares):
            return ()
        found = []
        for (s, _, ahead), shares in zip(self.rows, self._shares, strict=True):
            at = s.step + ahead + step
            # A pinned block's first step may have measured it, and decided nothing.
            found.append(
                Plan(s.start, s.stop, shares[at] if at < len(shares) else s.stop - s.start)
            )
        return tuple(found)

    def _place_unconditional(self, inside_BL: Tensor) -> None:
        """Find the cells where the copies of guided rows repeat their blocks."""
        facts = [
            (b, s.uncond.slot * self.slots.length, s.prompt_len)
            for b, s in enumerate(self.sequences)
            if s.uncond is not None
        ]
        facts_G3 = send(torch.tensor(facts, dtype=torch.long).view(-1, 3), self.device)
        self.uncond_rows_G, base_G, given_G = facts_G3.unbind(1)
        positions_GL = self.positions_BL[self.uncond_rows_G]
        ours_GL = inside_BL[self.uncond_rows_G] & (positions_GL >= given_G.unsqueeze(1))
        cells_GL = base_G.unsqueeze(1) + positions_GL
        self.uncond_cells_GL = torch.where(ours_GL, cells_GL, self.slots.trash)

    def _find_rules(self) -> Rules | None:
        """Return the rows' acceptance rules, if accepting is all that a step does to them."""
        more = self.links, self.branches, self.renoised, self.edits, any(self._measures)
        if self.kernels.name == TORCH.name or self.length > LONGEST or any(more):
            return None
        found = []
        for sequence in self.sequences:
            rule = sequence.policy.decoder.rule(sequence)
            if rule is None or sequence.policy.iteration.soft or sequence.uncond is not None:
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
        return state_SN.view(-1).index_select(0, self.cells_BL.view(-1)).view_as(self.cells_BL)

    def _put(self, state_SN: Tensor, block_BL: Tensor, cells_BL: Tensor | None = None) -> None:
        cells_BL = self.cells_BL if cells_BL is None else cells_BL
        state_SN.view(-1).index_copy_(0, cells_BL.view(-1), block_BL.view(-1))
