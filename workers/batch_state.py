"""The current blocks on the device: their contents, and which rows are done.

Letters: B sequences that denoise, L positions of the longest block, G rows that share a decoder.
"""

from collections import defaultdict
from collections.abc import Sequence as Items

import torch
from torch import Tensor

from diffray.components.backend import send
from diffray.components.block import Block, Plan, Proposal
from diffray.components.decoder import Decoder, Memory
from diffray.components.decoder_groups import DecoderGroup
from diffray.components.sequence import Sequence
from diffray.workers.outcome import Outcome, copy_outcomes
from diffray.workers.slots import Slots
from diffray.workers.top_tokens import TopTokens


class BatchState:
    """One row per sequence, valid until the block of any row changes."""

    def __init__(self, sequences: Items[Sequence], slots: Slots) -> None:
        self.sequences, self.slots, self.device = sequences, slots, slots.device
        self.lengths = [s.stop - s.start for s in sequences]
        self.length = max(self.lengths)
        self.edits = any(s.policy.decoder.edits for s in sequences)
        self._floors: list[float] = []
        self._shares = [s.policy.decoder.shares(s) for s in sequences]
        facts = [
            (
                s.start,
                s.stop,
                s.slot * slots.length,
                # An editing decoder may replace tokens from here on.
                s.prompt_len if s.policy.decoder.edits else s.stop,
                s.seed,
                s.steps_before,
                s.step,
                s.index,
                s.num_blocks,
                s.most_post_steps,
                s.post_steps,
            )
            for s in sequences
        ]
        # One copy to the device for all of them.
        start_B, stop_B, base_B, ours_B, self.seed_B, self.before_B, *rest = send(
            torch.tensor(facts), self.device
        ).unbind(1)
        self.steps_B, self.index_B, self.count_B, self.settle_B, self.settled_B = rest
        self.positions_BL = start_B.unsqueeze(1) + torch.arange(self.length, device=self.device)
        self.length_B = stop_B - start_B
        inside_BL = self.positions_BL < stop_B.unsqueeze(1)
        cells_BL = base_B.unsqueeze(1) + self.positions_BL
        self.cells_BL = torch.where(inside_BL, cells_BL, slots.trash)
        self.ours_BL = inside_BL & (self.positions_BL >= ours_B.unsqueeze(1))
        self.ids_BL = self._cells(slots.ids_SN)
        self.masked_BL = self._cells(slots.masked_SN) & inside_BL
        self.steps_BL = self._cells(slots.steps_SN)
        self.logprobs_BL = self._cells(slots.logprobs_SN)
        self.done_B = torch.zeros_like(self.steps_B, dtype=torch.bool)
        self.groups = self._plan_groups()
        self.top_tokens = TopTokens(sequences, self.length, self.device)

    @property
    def remembering(self) -> bool:
        """Whether the decoder of any row has a memory."""
        return any(group.memory is not None for group in self.groups)

    def now(self, step: int, first_only: Items[bool]) -> Block:
        """Return what decoders see at the `step`-th step of a round.

        Where a row is `first_only`, only the first position of its block.
        """
        floors = [s.policy.iteration.floor(s.steps_before + s.step + step) for s in self.sequences]
        if floors != self._floors:
            self._floors = floors
            self._floor_B = send(torch.tensor(floors, dtype=torch.float64), self.device)
        masked_BL = self.masked_BL  # nothing in rows that are done
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

    def accept(self, proposal: Proposal, block: Block) -> None:
        """Make accepted tokens final, and determine which rows are done."""
        open_BL = block.masked_BL | block.editable_BL if self.edits else block.masked_BL
        accepted_BL = self._accept(proposal, block) & open_BL
        accepted_BL |= _rescue(proposal, block, accepted_BL)
        self.ids_BL = torch.where(accepted_BL, proposal.ids_BL, self.ids_BL)
        self.masked_BL = self.masked_BL & ~accepted_BL
        self._put(self.slots.ids_SN, self.ids_BL)
        self._put(self.slots.masked_SN, self.masked_BL)
        self.steps_BL = torch.where(accepted_BL, block.step_B.unsqueeze(1), self.steps_BL)
        self.logprobs_BL = torch.where(accepted_BL, proposal.logprob_BL.float(), self.logprobs_BL)
        if proposal.top is not None:
            self.top_tokens.write(proposal.top, accepted_BL)

        active_B = ~self.done_B
        self.steps_B = self.steps_B + active_B
        empty_B = ~self.masked_BL.any(-1)
        if self.edits:
            self.settled_B = self.settled_B + (active_B & ~block.masked_BL.any(-1))
            empty_B &= ~accepted_BL.any(-1) | (self.settled_B >= self.settle_B)
        self.done_B = self.done_B | empty_B

    def outcomes(self) -> list[Outcome]:
        """Copy the outcome to the host: the only place where a round waits for the device."""
        counts_B3 = torch.stack([self.steps_B, self.settled_B, self.done_B.long()], dim=1)
        block = self.ids_BL, self.masked_BL, self.steps_BL, self.logprobs_BL
        return copy_outcomes(self.lengths, *block, counts_B3, self.top_tokens.rankings())

    def keep(self) -> None:
        """Save the state of unfinished blocks in their sequences, for the next plan."""
        self._put(self.slots.steps_SN, self.steps_BL)
        self._put(self.slots.logprobs_SN, self.logprobs_BL)
        self.top_tokens.keep()
        for group in self.groups:
            if group.memory is None:
                continue
            for g, b in enumerate(group.members):
                sequence = self.sequences[b]
                n = sequence.stop - sequence.start
                sequence.memory = Memory(*(part[g, :n, :n].clone() for part in group.memory))

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
        for s, shares in zip(self.sequences, self._shares, strict=True):
            at = s.step + step
            found.append(Plan(s.start, s.stop, shares[at] if at < len(shares) else 0))
        return tuple(found)

    def _plan_groups(self) -> list[DecoderGroup]:
        rows: dict[Decoder, list[int]] = defaultdict(list)
        for b, sequence in enumerate(self.sequences):
            rows[sequence.policy.decoder].append(b)
        return [
            DecoderGroup(
                decoder,
                members,
                send(torch.tensor(members), self.device),
                self._gather_memory(members) if decoder.remembers else None,
            )
            for decoder, members in rows.items()
        ]

    def _gather_memory(self, members: list[int]) -> Memory:
        """Stack the members' memories; a block takes at most L steps, so K = L."""
        shape = (len(members), self.length, self.length)
        ids = torch.full(shape, -1, device=self.device)
        credit = torch.zeros(shape, device=self.device, dtype=torch.float64)
        for g, b in enumerate(members):
            memory = self.sequences[b].memory
            if memory is not None:
                n = memory.ids_BLK.shape[0]
                ids[g, :n, :n], credit[g, :n, :n] = memory
        return Memory(ids, credit)

    def _cells(self, state_SN: Tensor) -> Tensor:
        return state_SN.view(-1).index_select(0, self.cells_BL.view(-1)).view_as(self.cells_BL)

    def _put(self, state_SN: Tensor, block_BL: Tensor) -> None:
        state_SN.view(-1).index_copy_(0, self.cells_BL.view(-1), block_BL.view(-1))


def _rescue(proposal: Proposal, block: Block, accepted_BL: Tensor) -> Tensor:
    """Return the best masked position of each row without an accepted token."""
    confidence_BL = proposal.confidence_BL.nan_to_num(nan=-2.0, neginf=-3.0)
    best_B1 = confidence_BL.masked_fill(~block.masked_BL, -4.0).argmax(-1, keepdim=True)
    is_best_BL = torch.arange(accepted_BL.shape[1], device=best_B1.device) == best_B1
    got_B1 = (accepted_BL & block.masked_BL).any(-1, keepdim=True)
    return is_best_BL & block.masked_BL & ~got_B1
