"""BatchPlan: runs rounds of denoising steps over all running sequences without reading results.

Letters: B sequences that denoise, T packed tokens, R rows of the head, H hidden size.
"""

from collections.abc import Sequence as Items
from dataclasses import replace

from torch import Tensor

from diffray.components.batch import Batch
from diffray.components.block import Block
from diffray.components.kv_pool import KVPool
from diffray.components.logits import Logits
from diffray.components.mesh import Mesh
from diffray.components.model import Model
from diffray.components.propose import choose, joined, propose_plain
from diffray.components.sequence import Sequence
from diffray.kernels.confidence import Confidence
from diffray.workers.batch_state import BatchState
from diffray.workers.chunked_prefill import Chunk
from diffray.workers.copy_pool import CopyPool
from diffray.workers.features.feature import StoredLogits, rows_of
from diffray.workers.features.order import FEATURES
from diffray.workers.first_step_sharing import SharedFirstSteps
from diffray.workers.graphs import Graphs
from diffray.workers.head_plan import HeadPlan, plan_head
from diffray.workers.layout import Layout, Span, spans_of
from diffray.workers.outcome import Outcome
from diffray.workers.slots import Slots


class BatchPlan:
    """Plans once for all rounds in which the same sequences denoise the same blocks.

    Every `denoise` is then device work with shapes that the host already knows.
    """

    def __init__(
        self,
        sequences: Items[Sequence],
        model: Model,
        kv: KVPool,
        slots: Slots,
        mesh: Mesh,
        copies: CopyPool,
        graphs: Graphs | None = None,
    ) -> None:
        self.sequences, self.copies = sequences, copies
        self.rows = rows_of(sequences)
        self.model, self.kv, self.slots, self.mesh = model, kv, slots, mesh
        self.device = slots.device
        self.length = max((s.block.length for s in sequences), default=0)
        found = [feature.of(self) for feature in FEATURES]
        self.features = [each for each in found if each is not None]
        self.graphs = graphs if all(each.replayed for each in self.features) else None
        self._windows: list[Span] = []
        self._shared: SharedFirstSteps | None = None  # first steps of this forward
        self._head: HeadPlan | None = None
        self.running: list[int] = []  # the rows whose windows run
        self.first_only: list[bool] = []  # whether each row needs only its first position
        self._blocks: BatchState | None = None  # not planned yet

    def denoise(self, step: int, chunks: Items[Chunk]) -> None:
        """Run one forward: the `step`-th of a round, and chunks of other sequences' prompts."""
        first_only = [row.sequence.block.first_alone and row.step + step == 0 for row in self.rows]
        if step == 0 or first_only != self.first_only:
            self._head = None  # fewer positions are masked now, or more are needed
        self.first_only = first_only
        self._place(step, chunks)
        hidden_TH = self._hidden()
        # The device has only started on that; the host plans the rest meanwhile.
        if not self.sequences:
            return
        if self._blocks is None:
            self._blocks = BatchState(self.sequences, self.slots, self.features, self.kv.kernels)
        block = self._blocks.now(step, first_only)
        self._choose(hidden_TH, self._blocks, block, step)
        for sequence, only in zip(self.sequences, first_only, strict=False):
            for copy in sequence.copies:
                copy.ready = not only  # one position alone does not show what would follow

    def outcomes(self) -> list[Outcome]:
        """Copy what happened to the host: the one place where a round waits for the device."""
        assert self._blocks is not None, "nothing has been denoised"
        return self._blocks.outcomes()

    def keep(self) -> None:
        """Save what unfinished blocks need under the next plan."""
        if self._blocks is not None:
            self._blocks.keep()

    def _hidden(self) -> Tensor:
        """Run the model on the windows of the canvases, or replay a recording of that."""
        layout = self.layout
        if layout.recorded is not None:
            return layout.recorded.forward()
        slots, batch = self.slots, layout.batch
        x_TH = self.model.embed(slots.ids_SN.view(-1).index_select(0, batch.cells_T))
        if self.model.spec.encodes and not self.model.spec.masked:
            batch = replace(batch, masked_T1=self.masked_of(batch))
        for feature in self.features:
            x_TH, batch = feature.inputs(self, x_TH, batch)
        # Adapters index their tokens in the whole batch, so it must stay whole.
        if self.sequences and not batch.adapted:
            read_R = self._plan_head().read_T
            if self._shared is not None:  # some are read twice, and others not computed here
                read_R = read_R[read_R < len(x_TH)].unique()
            batch = replace(batch, read_R=read_R)
        hidden_TH = self.model.forward(x_TH, batch, self.kv) if len(x_TH) else x_TH
        return hidden_TH if self._shared is None else self._shared.finish(hidden_TH, layout)

    def masked_of(self, batch: Batch) -> Tensor:
        """Return which tokens are masked, [T, 1]."""
        return self.slots.masked_SN.flatten()[batch.cells_T].unsqueeze(1)

    def _place(self, step: int, chunks: Items[Chunk]) -> None:
        """Lay out this step's windows; in most steps they are those of the step before."""
        windows, encoded = [], []
        for s in self.sequences:
            block = s.block
            start, stop = s.policy.cache.window(s, block.step + step)
            if s.policy.encodes and start < block.read_start < stop and not block.verifies:
                encoded += spans_of(s, start, block.read_start)
                start = block.read_start  # layers store all K/V before they read any
            # Without the block, nothing of it is seen either.
            windows.append(Span(s, start, stop, block.kv_stop if stop > block.start else stop))
        copied: list[Span] = []
        for own in windows:
            copied += self.copies.spans(own, own.sequence.block.step + step)
        windows += copied + encoded
        windows += [span for chunk in chunks for span in spans_of(*chunk)]
        windows += [w._replace(copy=copy) for w in windows for copy in w.sequence.mirrors]
        begins = [s.block.step + step == 0 for s in self.sequences]
        before, self._shared = self._shared, SharedFirstSteps.of(self.kv, windows, begins)
        if self._windows != windows or before or self._shared:
            self._windows = windows
            shown = {None, *(span.copy for span in copied)}
            self.running = [at for at, row in enumerate(self.rows) if row.copy in shown]
            self.copies.share_edges(copied)
            self.layout = self._laid_out(windows)
            self._head = None

    def _laid_out(self, windows: list[Span]) -> Layout:
        if self._shared is None:
            return Layout.of(windows, self.slots, self.kv.page_size, self.graphs)
        layout = Layout.of(self._shared.run, self.slots, self.kv.page_size, None)
        return self._shared.within(layout)

    def _plan_head(self) -> HeadPlan:
        """Return the rows of the head, planned once while the windows stay the same."""
        if self._head is None:
            self._head = plan_head(self)
            if self.layout.recorded is not None:
                self.layout.recorded.read(self._head.tokens_R)
        return self._head

    def _choose(self, hidden_TH: Tensor, blocks: BatchState, block: Block, step: int) -> None:
        """Choose tokens and accept some; one kernel accepts if the rows have rules.

        Logits are stored only if a request needs more than the best token.
        """
        plan = self._plan_head()
        if plan.plain:
            found = self._confidence(hidden_TH, plan, block)
            if blocks.rules is not None:
                return blocks.settle(found, plan.rows.cells_R, block)
            return blocks.accept(propose_plain(found, plan.rows, block), block)
        hidden_RH = hidden_TH.index_select(0, plan.tokens_R)
        logits = Logits(self.model.head(hidden_RH), self.model.spec.vocab_start, self.mesh)
        head = StoredLogits(hidden_TH, logits, plan, block, blocks.done_B, step)
        for feature in self.features:
            feature.read(self, head)
        chosen = choose(logits, plan.rows, block, self.slots.mask_token_id)
        for feature in self.features:
            feature.choose(chosen)
        proposal = chosen.proposal()
        for feature in self.features:
            proposal = feature.inspect(chosen, proposal)
        return blocks.accept(proposal, block)

    def _confidence(self, hidden_TH: Tensor, plan: HeadPlan, block: Block) -> Confidence:
        """Find the best or drawn token of each row without storing logits."""
        asked = [ids_RK for f in self.features if (ids_RK := f.asks(plan.rows)) is not None]
        draw, recorded = plan.rows.draw(block), self.layout.recorded
        if recorded is not None and draw is None and not asked:
            return joined(recorded.choose(len(plan.tokens_R)), self.mesh)
        hidden_RH = hidden_TH.index_select(0, plan.tokens_R)
        own = self.model.confidence(
            hidden_RH, self.slots.mask_token_id, draw, next(iter(asked), None)
        )
        found = joined(own, self.mesh)
        for feature in self.features:
            found = feature.adjust(found, plan.rows, block, self.kv.kernels)
        return found
