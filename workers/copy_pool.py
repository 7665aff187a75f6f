"""Lends copies to sequences: drafts, as long as they pay."""

from collections.abc import Sequence as Items
from typing import Final

import torch

from diffray.components.copies import Copy
from diffray.components.decoder import Decoder
from diffray.components.kv_pool import KVPool
from diffray.components.sequence import Sequence
from diffray.components.speculation import SUREST, Record
from diffray.workers.layout import Span
from diffray.workers.outcome import Outcome
from diffray.workers.slots import MOST_COPIES, Slots
from diffray.workers.stats import DraftStats

_MOST_RECORDS: Final = 64  # one for each decoder with its settings


class CopyPool:
    """Lends copies, which never take a request's slot, and return their pages when few are free.

    `overhead` is the fixed cost of a forward, as a number of positions; 0: no copies. There are at
    most 16 copies, and at most `most_windows` windows of sequences and copies.
    """

    def __init__(self, kv: KVPool, slots: Slots, overhead: int, most_windows: int | None) -> None:
        self.kv, self.slots = kv, slots
        self.overhead, self.most_windows = overhead, most_windows
        self.holders: dict[Sequence, int] = {}  # how many copies each sequence has
        self.running: dict[Sequence, int] = {}  # how many of them may run
        self._records: dict[tuple[Decoder, bool], Record] = {}  # by decoder, and whether greedy
        self.stats = DraftStats()

    def allot(self, sequences: Items[Sequence], *, waiting: bool = False) -> bool:
        """Give each sequence as many drafts as pay while these sequences run together.

        If too little is known of how often drafts are right, one is made and checked but not run.
        While other requests wait for memory there are no copies. Returns whether any sequence's
        copies change.
        """
        for sequence in sequences:
            sequence.canvas.overhead = self.overhead / len(sequences)
        sequences = [] if waiting else sequences
        for sequence in sequences:
            if sequence.policy.speculation is not None and sequence.block.step == 0:
                sequence.acceptance.begin(self._record(sequence))
        self.running = self._wanted(sequences)
        wanted = self.running | self._to_watch(sequences)
        if wanted == self.holders:
            return False
        for sequence in self.holders:
            self._drop(sequence, wanted.get(sequence, 0))
        for sequence, count in wanted.items():
            missing = count - len(sequence.copies)
            sequence.copies += [self.slots.lend_copy() for _ in range(missing)]
        self.holders = wanted
        return True

    def note(self, sequence: Sequence, outcome: Outcome) -> None:
        """Record how many drafts of a round were right."""
        right = outcome.step - sequence.block.step - 1
        sequence.acceptance.note(right, foreseen=outcome.foreseen, done=outcome.done)
        run = sequence.acceptance.run
        if sequence.policy.iteration.drafts and sequence.block.verifies:
            run, right = sequence.block.num_drafts, outcome.decided - 1
        if run:
            self.stats = DraftStats(self.stats.run + run, self.stats.right + min(right, run))

    def give_back(self, sequence: Sequence) -> None:
        """Take all copies back from a sequence."""
        if self.holders.pop(sequence, 0):
            self._drop(sequence, 0)

    def spans(self, own: Span, step: int) -> list[Span]:
        """Return the windows of a sequence's copies beside its own, at this step of its block.

        Outside its window a copy reads the K/V that the sequence has stored, so copies run the same
        positions as the sequence. Their own K/V are not kept, so the next step must run these
        positions again; otherwise it would read what the sequence stored earlier.
        """
        found: list[Span] = []
        sequence = own.sequence
        copies, acceptance = sequence.copies, sequence.acceptance
        masks = int(sequence.block.masked.sum()) if copies else 0  # each step takes one
        acceptance.lent = masks > 1
        acceptance.made = acceptance.lent and copies[0].ready
        for number, copy in enumerate(copies[: self.running.get(sequence, 0)], 1):
            window = sequence.policy.cache.window(sequence, step + number)
            start, stop = sequence.policy.cache.window(sequence, step + number + 1)
            if window != (own.start, own.stop) or start > own.start or stop < own.stop:
                break
            if not copy.ready or number >= masks or not self._cover(copy, own):
                break
            found.append(own._replace(copy=copy))
        acceptance.run = len(found)
        return found

    def share_edges(self, spans: Items[Span]) -> None:
        """Copy the first and the last page of these windows, which also hold other positions."""
        pages, onto = [], []
        for span in spans:
            assert span.copy is not None
            first = span.start // self.kv.page_size
            last = first + len(span.copy.pages) - 1
            for page in {first, last}:
                pages.append(span.sequence.kv.pages[page])
                onto.append(span.copy.pages[page - first])
        if pages:
            self.kv.copy(pages, onto)

    def _wanted(self, sequences: Items[Sequence]) -> dict[Sequence, int]:
        """Return how many drafts of each sequence pay.

        A draft gains its chance to be right, in steps, and costs its positions. It pays if it gains
        more steps per position than the forward without it, overhead included. The likeliest drafts
        come first.
        """
        wanted: dict[Sequence, int] = {}
        most = MOST_COPIES
        if self.most_windows is not None:
            most = min(most, max(self.most_windows - len(sequences), 0))
        if not sequences or not self.overhead:
            return wanted
        offers = [
            (sequence.acceptance.rate**ahead, sequence)
            for sequence in sequences
            if sequence.policy.speculation is not None
            for ahead in range(1, sequence.policy.speculation.drafts + 1)
        ]
        if not offers:
            return wanted
        offers.sort(key=lambda offer: -offer[0])
        sizes = {sequence: _size(sequence) for sequence in sequences}
        cost = self.overhead + sum(sizes.values())
        steps = float(len(sequences))
        for rate, sequence in offers[:most]:
            if rate * cost <= steps * sizes[sequence]:
                continue
            wanted[sequence] = wanted.get(sequence, 0) + 1
            cost, steps = cost + sizes[sequence], steps + rate
        return wanted

    def _to_watch(self, sequences: Items[Sequence]) -> dict[Sequence, int]:
        """Return the sequences that get a draft only to learn whether drafts would pay."""
        cost = self.overhead + sum(map(_size, sequences))
        found = [
            sequence
            for sequence in sequences
            if sequence.policy.speculation is not None
            and sequence.acceptance.watched
            and sequence not in self.running
            and SUREST * cost > len(sequences) * _size(sequence)
        ]
        left = MOST_COPIES - sum(self.running.values()) if self.overhead else 0
        return dict.fromkeys(found[:left], 1)

    def _record(self, sequence: Sequence) -> Record:
        """Return the record of requests with this decoder."""
        key = sequence.policy.decoder, sequence.params.temperature == 0
        if key not in self._records and len(self._records) == _MOST_RECORDS:
            del self._records[next(iter(self._records))]
        return self._records.setdefault(key, Record())

    def _cover(self, copy: Copy, own: Span) -> bool:
        """Give a copy its own pages for its window; return whether enough were free."""
        covers = own.start, own.stop, own.kv_stop
        if copy.covers == covers:
            return True
        self._free_pages(copy)
        first = own.start // self.kv.page_size
        count = self.kv.pages_for(own.stop) - first
        if count > self.kv.num_free:
            return False
        copy.pages, copy.covers = self.kv.allocate(count), covers
        assert own.sequence.kv.pages_P is not None
        copy.pages_P = own.sequence.kv.pages_P.clone()
        copy.pages_P[first : first + count] = torch.tensor(copy.pages)
        return True

    def _drop(self, sequence: Sequence, left: int) -> None:
        for copy in sequence.copies[left:]:
            self._free_pages(copy)
            self.slots.take_back(copy)
        del sequence.copies[left:]

    def _free_pages(self, copy: Copy) -> None:
        self.kv.free(copy.pages)
        copy.pages, copy.covers = [], None


def _size(sequence: Sequence) -> int:
    """Return how many positions a step runs after the block's first."""
    start, stop = sequence.policy.cache.window(sequence, max(sequence.block.step, 1))
    return stop - start
