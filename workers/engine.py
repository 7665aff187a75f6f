"""One rank's engine: admits requests, runs rounds of denoising steps, reports final tokens.

It is deterministic: ranks that receive the same calls in the same order do the same, which keeps
those of a replica in step.
"""

from collections import deque
from collections.abc import Callable
from collections.abc import Sequence as Items

import torch

from diffray.components.backend import with_threads
from diffray.components.kv_pool import KVPool
from diffray.components.lora import LoRA
from diffray.components.mesh import Mesh
from diffray.components.model import Model
from diffray.components.prefixes import num_held
from diffray.components.sequence import Sequence
from diffray.workers.adapters import Adapters
from diffray.workers.admission import check
from diffray.workers.batch_plan import BatchPlan
from diffray.workers.changes import FIXED, Changes
from diffray.workers.chunked_prefill import ChunkedPrefill
from diffray.workers.copy_pool import CopyPool
from diffray.workers.graphs import Graphs
from diffray.workers.limits import Limits
from diffray.workers.messages import Change, R, Reply, Request, Round, Update
from diffray.workers.outcome import Outcome
from diffray.workers.pace import steps_ahead
from diffray.workers.prefix_memory import prefix_stats
from diffray.workers.report import merge, report
from diffray.workers.slots import Slots
from diffray.workers.stats import Stats


class Engine:
    """Continuous batching of windows over a paged K/V pool."""

    def __init__(
        self,
        model: Model,
        kv: KVPool,
        slots: Slots,
        *,
        eos_token_ids: Items[int],
        mesh: Mesh | None = None,
        chunk: int = 512,
        graphs: Graphs | None = None,
        threads: int | None = None,
        draft_overhead: int = 256,
        changes: Changes | None = None,
    ) -> None:
        self.model, self.kv, self.slots = model, kv, slots
        self.mesh = mesh or Mesh()
        self.eos_token_ids = tuple(eos_token_ids)
        self.prefill = ChunkedPrefill(kv, chunk)
        self.graphs = graphs  # recorded steps; None: every step is launched
        self.threads = threads  # None: torch's number
        most_windows = None if graphs is None else slots.num_slots
        self.changes = changes  # None: its weights cannot be replaced
        self.adapters: Adapters | None = None  # None: adapters are not supported
        self.drafter: LoRA | None = None  # the checkpoint's own adapter
        self.copies = CopyPool(kv, slots, draft_overhead, most_windows)
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []  # in the order of admission
        self._batch_plan: BatchPlan | None = None  # the current plan; None if it is no longer valid
        self._unreported: dict[int, Update] = {}  # of an interrupted round
        self.preemptions = self.forwards = self.tokens = 0  # since the start

    @property
    def idle(self) -> bool:
        return not self.waiting and not self.running

    @property
    def limits(self) -> Limits:
        """The limits of a request, for processes that have no engine."""
        return Limits(
            spec=self.model.spec,
            context=min(self.slots.length, self.model.spec.max_positions),
            max_num_seqs=self.slots.num_slots,
            num_pages=self.kv.num_pages - 1,
            page_size=self.kv.page_size,
            eos_token_ids=self.eos_token_ids,
            mask_token_id=self.slots.mask_token_id,
            shares_prefixes=self.kv.prefixes.enabled,
            drafter=self.drafter,
        )

    def check(self, request: Request) -> Sequence:
        """Return the request as a sequence, or refuse it with a reason; changes nothing."""
        return check(request, self.limits)

    def add(self, request: Request) -> None:
        """Queue a request, or refuse it now if it could never run."""
        self.enqueue(self.check(request))

    def enqueue(self, sequence: Sequence) -> None:
        for lora in (sequence.lora, sequence.drafter):
            if lora is not None:
                if self.adapters is None:
                    raise ValueError("this engine takes no adapters")
                self.adapters.enter(lora, [*self.running, *self.waiting])
        self.waiting.append(sequence)

    def cancel(self, uid: int) -> None:
        """Drop a request and free what it holds; do nothing if it has already ended."""
        self._unreported.pop(uid, None)
        for sequence in self.running:
            if sequence.uid == uid:
                self._release(sequence)
                break
        self.waiting = deque(s for s in self.waiting if s.uid != uid)

    def cancel_all(self) -> None:
        """Drop all requests, and what an interrupted round found of them."""
        for sequence in [*self.running, *self.waiting]:
            self.cancel(sequence.uid)
        self._unreported.clear()

    def preempt(self, uid: int) -> None:
        """Take slot and pages from a running request; it resumes later with the same tokens."""
        for sequence in self.running:
            if sequence.uid == uid:
                self._release(sequence)
                sequence.rewind()
                self.waiting.appendleft(sequence)
                self.preemptions += 1
                return

    @torch.inference_mode()
    def step(self, steps: int = 1) -> list[Update]:
        """Run one round of at most `steps` denoising steps; report the tokens that became final.

        Blocks may end and begin in it. It is shorter if a request ends, so that another can follow,
        or if one watches its canvas.
        """
        before, end, found = -1, self.forwards + steps, self._unreported
        while before < self.forwards < end:
            before = self.forwards
            with with_threads(self.threads):
                updates = self._run_ahead(end - before)
            for update in updates:
                merge(found, update)
            if any(update.finish_reason or update.canvas is not None for update in updates):
                break
        self._unreported = {}
        return list(found.values())

    def _run_ahead(self, steps: int) -> list[Update]:
        """Run at most `steps` steps before looking at their results.

        There are fewer if a block may end sooner, because finished rows would only wait. Until then
        `block.step` stays: the current step of a block is `block.step + step`.
        """
        self._admit()
        if not self.running:
            return []
        begins = [s for s in self.running if s.block.step == 0]
        for sequence in begins:
            self.prefill.skip_shared(sequence, self.prefill.stored_next)
        prefilling = [s for s in begins if not self.prefill.is_done(s)]
        denoising = [s for s in self.running if s not in prefilling]
        if steps > 1:
            steps = min([steps, *map(steps_ahead, denoising)])
        plan = self._plan(denoising)
        try:
            for step in range(steps):
                chunks = self.prefill.chunks(prefilling)
                ready = step and any(map(self.prefill.is_done, prefilling))
                if not denoising and (ready or not chunks):
                    break  # a sequence is ready to denoise, or nothing is left to do
                plan.denoise(step, chunks)
                self.forwards += 1
                for chunk in chunks:
                    self.kv.prefixes.keep(chunk.sequence, chunk.stop)
                    chunk.sequence.forwards += 1
            outcomes = plan.outcomes() if denoising else []
        except BaseException:
            # Interrupted, for instance by Ctrl-C: the device may be ahead of what the host knows.
            self._batch_plan = None
            for sequence in reversed(denoising):
                self.preempt(sequence.uid)
            raise
        updates = []
        for sequence, outcome in zip(denoising, outcomes, strict=True):
            sequence.forwards += steps
            if sequence.slot >= 0:  # else another sequence's next block has preempted it
                updates.append(self._settle(sequence, outcome))
        return [u for u in updates if u.ids or u.finish_reason or u.canvas is not None]

    def run(self, order: Round[R], as_sequence: Callable[[R], Sequence]) -> Reply:
        """Cancel, change, admit and denoise as ordered; a request that cannot run is refused."""
        refused = []
        self.kv.pass_time(order.now)
        for uid in order.cancel:
            self.cancel(uid)
        unchanged = "" if order.change is None else self._apply(order.change)
        for request in order.add:
            try:
                if self.changes is not None and self.changes.unfit:
                    raise ValueError(self.changes.unfit)
                self.enqueue(as_sequence(request))
            except ValueError as error:
                refused.append((request.uid, str(error)))
        before = self.forwards
        updates = self.step(order.steps)
        reply = Reply(order.number, self.forwards - before, updates, refused, self.stats())
        reply.unchanged = unchanged
        return reply

    def _apply(self, change: Change) -> str:
        assert self.idle, "a change while requests run"
        if self.changes is None:
            return FIXED
        unchanged = self.changes.apply(change)
        if unchanged and change.restores:
            raise RuntimeError(f"the weights {change.version} could not be restored: {unchanged}")
        return unchanged

    def stats(self) -> Stats:
        """Return the engine's counts; reads host integers only."""
        return Stats(
            running=len(self.running),
            waiting=len(self.waiting),
            free_pages=self.kv.num_free,
            num_pages=self.kv.num_pages - 1,
            preemptions=self.preemptions,
            forwards=self.forwards,
            tokens=self.tokens,
            prefixes=prefix_stats(self.kv),
            drafts=self.copies.stats,
        )

    # The plan that rounds share.

    def _plan(self, denoising: list[Sequence]) -> BatchPlan:
        changed = self.copies.allot(denoising, waiting=bool(self.waiting))
        if changed or self._batch_plan is None or self._batch_plan.sequences != denoising:
            self._drop_plan()
            self._batch_plan = BatchPlan(
                denoising, self.model, self.kv, self.slots, self.mesh, self.copies,
                self.graphs,
            )  # fmt: skip
        return self._batch_plan

    def _drop_plan(self) -> None:
        """Save what the plan has of unfinished blocks, and drop it: a block is about to change."""
        if self._batch_plan is not None:
            self._batch_plan.keep()
            self._batch_plan = None

    # Memory.

    def _pages(self, sequence: Sequence, stop: int) -> int:
        return self.kv.pages_for(stop) * sequence.num_stored

    def _admit(self) -> None:
        """Start waiting requests in order, as long as slots and pages last.

        If the first does not fit, the others wait too: small requests that overtake a big one
        could keep it waiting forever.
        """
        while self.waiting and self.slots.has_room(self.waiting[0]):
            sequence = self.waiting[0]
            found = self.kv.prefixes.find(sequence)
            if not self._room(self._pages(sequence, sequence.block.kv_stop) - num_held(found)):
                return
            self.waiting.popleft()
            self.slots.admit(sequence)
            self.running.append(sequence)
            self.kv.hold(sequence, found)
            self._extend(sequence)
            self.kv.prefixes.promise(sequence)

    def _room(self, pages: int) -> bool:
        """Return whether this many pages are free; if not, take the copies' pages back first."""
        if pages > self.kv.num_free and self.copies.allot([]):
            self._drop_plan()
        return pages <= self.kv.num_free

    def _extend(self, sequence: Sequence) -> None:
        """Allocate pages up to the end of what the current block sees; the caller has made room."""
        missing = self.kv.pages_for(sequence.block.kv_stop) - len(sequence.kv.pages)
        if missing > 0:
            for stored in sequence.stored:
                stored.pages += self.kv.allocate(missing)
                stored.pages_P = torch.tensor(stored.pages)

    def _grow(self, sequence: Sequence) -> None:
        """Make room for the next block; preempt the latest sequences, perhaps this one too."""
        held = len(sequence.kv.pages) * sequence.num_stored
        while not self._room(self._pages(sequence, sequence.block.kv_stop) - held):
            latest = self.running[-1]
            self.preempt(latest.uid)
            if latest is sequence:
                return
        self._extend(sequence)

    def _release(self, sequence: Sequence) -> None:
        self._drop_plan()
        self.running.remove(sequence)
        self.copies.give_back(sequence)
        self.kv.free(self.kv.prefixes.release(sequence))
        for copy in sequence.mirrors:
            self.kv.free(copy.pages)
        self.slots.release(sequence)
        sequence.kv.pages, sequence.kv.pages_P = [], None

    # After a round.

    def _settle(self, sequence: Sequence, outcome: Outcome) -> Update:
        """Apply a round's outcome: report final tokens, move to the next block, or finish."""
        block = sequence.block
        self.copies.note(sequence, outcome)
        block.step = outcome.step
        block.post_steps = outcome.post_steps
        if sequence.kv.clean_end < block.final_stop:  # the first step stored the missing K/V
            self.kv.prefixes.keep(sequence, block.final_stop)
        assert block.step <= sequence.most_steps, "a block took more steps than it may"
        if block.drafted:
            self._drop_plan()  # the next step is of another kind
            outcome = outcome.verified(sequence)
        block.masked = outcome.masked
        if sequence.may_shrink:
            outcome = self._shrink(sequence, outcome)
        update = report(sequence, outcome)
        self.tokens += len(update.ids)
        if update.finish_reason:
            self._release(sequence)
        elif outcome.done:
            self._drop_plan()
            length = sequence.canvas.length
            sequence.finish_block(outcome.ids)
            if block.drafted:
                self.kv.prefixes.keep(sequence, sequence.block.final_stop)
            if sequence.canvas.length > length:
                self.slots.write(sequence)
            self._grow(sequence)
        elif sequence.block.index > block.index:  # it skipped a block
            self._grow(sequence)
        return update

    def _shrink(self, sequence: Sequence, outcome: Outcome) -> Outcome:
        """Remove unused positions from a canvas, and return the block's outcome then."""
        self._drop_plan()
        if not sequence.shrink(outcome.ids, outcome.masked.tolist(), outcome):
            return outcome
        self.slots.write(sequence)
        return Outcome.before_steps(sequence, self.slots.mask_token_id)
