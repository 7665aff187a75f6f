"""Rounds: some denoising steps of all running sequences each, without looking at what came out.

Letters: B sequences that denoise, L positions of the longest block, T packed tokens, R rows of the
head, G rows that share a decoder, H hidden size.
"""

from collections import defaultdict
from collections.abc import Sequence as Items
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from diffray.components.backend import send
from diffray.components.block import Block, Proposal
from diffray.components.decoder import Decoder, Memory
from diffray.components.kv_pool import KVPool
from diffray.components.logits import Logits
from diffray.components.mesh import Mesh
from diffray.components.model import Model
from diffray.components.propose import joined, propose, propose_plain
from diffray.components.sequence import Sequence
from diffray.components.teams import Team, recall, rewarded
from diffray.kernels.confidence import Confidence
from diffray.workers.graphs import Graphs
from diffray.workers.layout import Layout, Span
from diffray.workers.outcome import Outcome, copy_outcomes
from diffray.workers.request_rows import Asked, Softened, ask
from diffray.workers.slots import Slots
from diffray.workers.top_tokens import TopTokens


class Chunk(NamedTuple):
    """A part of a long prompt, to be stored before its sequence's first block."""

    sequence: Sequence
    start: int
    stop: int


class Rounds:
    """Plans once for all rounds in which the same sequences denoise the same blocks.

    Every `denoise` is then device work of shapes known beforehand.
    """

    def __init__(
        self,
        sequences: Items[Sequence],
        model: Model,
        kv: KVPool,
        slots: Slots,
        mesh: Mesh,
        graphs: Graphs | None = None,
    ) -> None:
        self.sequences = sequences
        self.model, self.kv, self.slots, self.mesh = model, kv, slots, mesh
        self.device = slots.device
        self.lengths = [s.stop - s.start for s in sequences]
        self.length = max(self.lengths, default=0)
        self.soft = any(s.policy.iteration.soft for s in sequences)
        self.edits = any(s.policy.decoder.edits for s in sequences)
        # Soft embeddings are added to what a recording would look up by itself.
        self.graphs = None if self.soft else graphs
        self._windows: list[Span] = []
        self._asked: Asked | None = None
        self._floors: list[float] = []
        self._planned = False

    def denoise(self, step: int, chunks: Items[Chunk]) -> None:
        """Run one forward: the `step`-th of a round, and chunks of other sequences' prompts."""
        if step == 0:
            self._asked = None  # fewer positions are masked by now
        self._place(step, chunks)
        hidden_TH = self._hidden()
        # A device has only begun with that: what else there is to plan is planned meanwhile.
        if not self.sequences:
            return
        if not self._planned:
            self._plan_blocks()
            self._planned = True
        block = self._block(step)
        self._write(self._propose(hidden_TH, block, step), block)

    def _hidden(self) -> Tensor:
        """Run the model on the canvases at the windows, or replay that."""
        layout = self._layout
        if layout.recorded is not None:
            return layout.recorded.forward()
        slots = self.slots
        ids_T = slots.ids_SN.view(-1).index_select(0, layout.batch.cells_T)
        if layout.blank_T is not None:
            ids_T = ids_T.masked_fill(layout.blank_T, slots.mask_token_id)
        x_TH = self.model.embed(ids_T)
        if self.soft:
            slots.soften(x_TH)
            assert slots.soft_SNH is not None
            masked_T1 = slots.masked_SN.flatten()[layout.batch.cells_T].unsqueeze(1)
            x_TH = x_TH + slots.soft_SNH.flatten(0, 1)[layout.batch.cells_T] * masked_T1
        read_R = self._ask().read() if self.sequences else None
        return self.model.forward(x_TH, replace(layout.batch, read_R=read_R), self.kv)

    def outcomes(self) -> list[Outcome]:
        """Copy what happened to the host: the one place where a round waits for the device."""
        counts_B3 = torch.stack([self.steps_B, self.settled_B, self.done_B.long()], dim=1)
        block = self.ids_BL, self.masked_BL, self.steps_BL, self.logprobs_BL
        return copy_outcomes(self.lengths, *block, counts_B3, self.top_tokens.rankings())

    def keep(self) -> None:
        """Hand over what the blocks that are not done need to know after another plan."""
        if not self._planned:
            return
        self._put(self.slots.steps_SN, self.steps_BL)
        self._put(self.slots.logprobs_SN, self.logprobs_BL)
        self.top_tokens.keep()
        for team in self.teams:
            if team.memory is None:
                continue
            for g, b in enumerate(team.rows_G.tolist()):
                sequence = self.sequences[b]
                n = sequence.stop - sequence.start
                sequence.memory = Memory(*(part[g, :n, :n].clone() for part in team.memory))

    # Planning: host integers become the tensors that all steps of the round share.

    def _plan_blocks(self) -> None:
        sequences, device, slots = self.sequences, self.device, self.slots
        facts = [
            (
                s.start,
                s.stop,
                s.slot * slots.length,
                # An editing decoder may replace what stands from here on.
                s.prompt_len if s.policy.decoder.edits else s.stop,
                s.seed,
                s.steps_before,
                s.step,
                s.index,
                s.num_blocks,
                s.policy.decoder.settle_steps(),
                s.settled,
            )
            for s in sequences
        ]
        # One copy to the device for them all.
        start_B, stop_B, base_B, ours_B, self.seed_B, self.before_B, *rest = send(
            torch.tensor(facts), device
        ).unbind(1)
        self.steps_B, self.index_B, self.count_B, self.settle_B, self.settled_B = rest
        self.positions_BL = start_B.unsqueeze(1) + torch.arange(self.length, device=device)
        inside_BL = self.positions_BL < stop_B.unsqueeze(1)
        cells_BL = base_B.unsqueeze(1) + self.positions_BL
        self.cells_BL = torch.where(inside_BL, cells_BL, slots.trash)
        self.ours_BL = inside_BL & (self.positions_BL >= ours_B.unsqueeze(1))
        self.ids_BL = self._cells(slots.ids_SN)
        self.masked_BL = self._cells(slots.masked_SN) & inside_BL
        self.steps_BL = self._cells(slots.steps_SN)
        self.logprobs_BL = self._cells(slots.logprobs_SN)
        self.done_B = torch.zeros_like(self.steps_B, dtype=torch.bool)
        self.teams = self._plan_teams()
        self.plain = all(team.memory is None for team in self.teams)
        self.top_tokens = TopTokens(sequences, self.length, device)

    def _plan_teams(self) -> list[Team]:
        rows: dict[Decoder, list[int]] = defaultdict(list)
        for b, sequence in enumerate(self.sequences):
            rows[sequence.policy.decoder].append(b)
        return [
            Team(
                decoder,
                send(torch.tensor(members), self.device),
                self._gather_memory(members) if decoder.remembers else None,
            )
            for decoder, members in rows.items()
        ]

    def _gather_memory(self, members: list[int]) -> Memory:
        """Stand the members' memories side by side; a block takes at most L steps, so K = L."""
        shape = (len(members), self.length, self.length)
        ids = torch.full(shape, -1, device=self.device)
        credit = torch.zeros(shape, device=self.device, dtype=torch.float64)
        for g, b in enumerate(members):
            memory = self.sequences[b].memory
            if memory is not None:
                n = memory.ids_BLK.shape[0]
                ids[g, :n, :n], credit[g, :n, :n] = memory
        return Memory(ids, credit)

    def _place(self, step: int, chunks: Items[Chunk]) -> None:
        """Find this step's windows a place; in most steps they stand as in the one before."""
        windows = [(s, *s.policy.cache.window(s, s.step + step), s.kv_stop) for s in self.sequences]
        windows += [(chunk.sequence, chunk.start, chunk.stop, chunk.stop) for chunk in chunks]
        if self._windows != windows:
            self._windows = windows
            self._layout = Layout.of(windows, self.slots, self.kv.page_size, self.graphs)
            self._asked = None

    def _ask(self) -> Asked:
        """Return what is asked of the head, for as long as the windows stand."""
        if self._asked is None:
            self._asked = ask(self.sequences, self._layout, self.length, self.device)
            if self._layout.recorded is not None:
                self._layout.recorded.read(self._asked.tokens_R)
        return self._asked

    # One step on the device.

    def _cells(self, state_SN: Tensor) -> Tensor:
        return state_SN.view(-1).index_select(0, self.cells_BL.view(-1)).view_as(self.cells_BL)

    def _put(self, state_SN: Tensor, block_BL: Tensor) -> None:
        state_SN.view(-1).index_copy_(0, self.cells_BL.view(-1), block_BL.view(-1))

    def _block(self, step: int) -> Block:
        floors = [s.policy.iteration.floor(s.steps_before + s.step + step) for s in self.sequences]
        if floors != self._floors:
            self._floors = floors
            self._floor_B = send(torch.tensor(floors, dtype=torch.float64), self.device)
        editable_BL = self.ours_BL  # empty, unless somebody edits
        if self.edits:
            editable_BL = self.ours_BL & ~self.masked_BL & ~self.done_B.unsqueeze(1)
        return Block(
            ids_BL=self.ids_BL,
            masked_BL=self.masked_BL,  # nothing is where a row is done
            editable_BL=editable_BL,
            positions_BL=self.positions_BL,
            seed_B=self.seed_B,
            step_B=self.before_B + self.steps_B,
            step_in_block_B=self.steps_B,
            index_B=self.index_B,
            count_B=self.count_B,
            floor_B=self._floor_B,
        )

    def _propose(self, hidden_TH: Tensor, block: Block, step: int) -> Proposal:
        """Choose tokens; the logits are written only where somebody wants more than the best."""
        asked, mask_token_id = self._ask(), self.slots.mask_token_id
        if asked.plain and (self.plain or asked.rows.draws is None):
            found = self._confidence(hidden_TH, asked, block)
            return propose_plain(found, asked.rows, block)
        logits = self._logits(hidden_TH, asked)
        if asked.soft is not None:
            self._soften(logits, asked.soft, step)
        chosen = logits.rows(len(asked.rows.cells_R))
        return propose(chosen, asked.rows, block, self.teams, mask_token_id)

    def _confidence(self, hidden_TH: Tensor, asked: Asked, block: Block) -> Confidence:
        """Find the best or the drawn token of each row, with what decoders add to logits."""
        cells_R, mask_token_id = asked.rows.cells_R, self.slots.mask_token_id
        draw, known_RK = asked.rows.draw(block), recall(self.teams, cells_R, block)
        recorded = self._layout.recorded
        if recorded is not None and draw is None and known_RK is None:
            return joined(recorded.choose(len(asked.tokens_R)), self.mesh)
        hidden_RH = hidden_TH.index_select(0, asked.tokens_R)
        found = joined(self.model.confidence(hidden_RH, mask_token_id, draw, known_RK), self.mesh)
        if known_RK is None:
            return found
        return rewarded(found, known_RK, self.teams, cells_R, block, mask_token_id)

    def _logits(self, hidden_TH: Tensor, asked: Asked) -> Logits:
        values_RV = self.model.head(hidden_TH.index_select(0, asked.tokens_R))
        if asked.guided is not None:
            rows_U, twins_U, scale_U = asked.guided
            blind_UV = self.model.head(hidden_TH.index_select(0, twins_U))
            scale_U1 = scale_U.unsqueeze(1).to(values_RV)
            values_RV[rows_U] = blind_UV + (scale_U1 + 1) * (values_RV[rows_U] - blind_UV)
        logits = Logits(values_RV, self.model.spec.vocab_start, self.mesh)
        if asked.rows.edits is not None:
            logits.add(*asked.rows.edits)
        for rows, ids_K in asked.rows.only:
            logits.keep_only(rows, ids_K)
        return logits

    def _soften(self, logits: Logits, soft: Softened, step: int) -> None:
        """Store what the model expects at masked positions, weighted for this step."""
        assert self.slots.soft_SNH is not None
        weights = [
            s.policy.iteration.weight(s.steps_before + s.step + step) for s in self.sequences
        ]
        rows_E, cells_E, row_E = soft
        values_EV = logits.values_RV[rows_E]
        probs_EV = (values_EV - logits.logsumexp()[rows_E].unsqueeze(1)).exp()
        expected_EH = self.model.expected_embedding(probs_EV)
        weight_B = send(torch.tensor(weights, dtype=expected_EH.dtype), self.device)
        flat_EH = self.slots.soft_SNH.view(-1, self.slots.soft_SNH.shape[-1])
        before_EH = flat_EH[cells_E]
        active_E1 = ~self.done_B[row_E].unsqueeze(1)
        after_EH = (expected_EH * weight_B[row_E].unsqueeze(1)).to(flat_EH)
        flat_EH[cells_E] = torch.where(active_E1, after_EH, before_EH)

    def _accept(self, proposal: Proposal, block: Block) -> Tensor:
        """Ask each team's decoder about its rows."""
        if len(self.teams) == 1:  # nothing to be picked apart
            return self.teams[0].decoder.accept(proposal, block)
        accepted_BL = torch.zeros_like(self.masked_BL)
        for team in self.teams:
            ours = proposal.rows(team.rows_G), block.rows(team.rows_G)
            accepted_BL[team.rows_G] = team.decoder.accept(*ours)
        return accepted_BL

    def _write(self, proposal: Proposal, block: Block) -> None:
        """Make accepted tokens final, and find out which rows are done."""
        open_BL = block.masked_BL | block.editable_BL if self.edits else block.masked_BL
        accepted_BL = self._accept(proposal, block) & open_BL
        accepted_BL |= _rescue(proposal, block, accepted_BL)
        self.ids_BL = torch.where(accepted_BL, proposal.ids_BL, self.ids_BL)
        self.masked_BL = block.masked_BL & ~accepted_BL
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


def _rescue(proposal: Proposal, block: Block, accepted_BL: Tensor) -> Tensor:
    """Return the most confident masked position of each row that got none: every step counts."""
    confidence_BL = proposal.confidence_BL.nan_to_num(nan=-2.0, neginf=-3.0)
    best_B1 = confidence_BL.masked_fill(~block.masked_BL, -4.0).argmax(-1, keepdim=True)
    is_best_BL = torch.arange(accepted_BL.shape[1], device=best_B1.device) == best_B1
    got_B1 = (accepted_BL & block.masked_BL).any(-1, keepdim=True)
    return is_best_BL & block.masked_BL & ~got_B1
