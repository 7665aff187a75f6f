"""Stores long prompts of block-causal models in chunks, before their first block."""

from collections.abc import Callable
from typing import NamedTuple

from diffray.components.kv_pool import KVPool
from diffray.components.sequence import Sequence


class Chunk(NamedTuple):
    """A part of a long prompt, to be stored before its sequence's first block."""

    sequence: Sequence
    start: int
    stop: int

    @staticmethod
    def next(sequence: Sequence, most: int) -> "Chunk":
        """Return the next chunk to store: whole blocks, of at most `most` positions or just one.

        Of a policy that encodes in pieces, it is whole pieces instead.
        """
        block, canvas = sequence.policy.causal_length, sequence.canvas
        start = sequence.kv.clean_end
        stop = start + max(most // block, 1) * block
        if sequence.policy.pieces:
            last = start + most - (start + most - canvas.prompt_len) % block
            stop = max(canvas.piece_end(start), last)
        stop = min(stop, sequence.block.final_stop)
        return Chunk(sequence, start, sequence.images.not_inside(stop))


class ChunkedPrefill:
    """Decides which parts of prompts the next forward stores; others may share them."""

    def __init__(self, kv: KVPool, chunk: int) -> None:
        self.kv, self.chunk = kv, chunk

    def skip_shared(
        self, sequence: Sequence, stored_next: Callable[[Sequence], int] | None = None
    ) -> None:
        """Skip the part of the prefix that other sequences store."""
        self.kv.prefixes.skip_stored(sequence, stored_next)
        if not sequence.forwards:  # it has stored nothing itself
            sequence.kv.cached = sequence.kv.clean_end

    def is_done(self, sequence: Sequence) -> bool:
        """Return whether the sequence can denoise."""
        return not self._has_chunks(sequence) and self.kv.prefixes.has_turn(sequence)

    def stored_next(self, sequence: Sequence) -> int:
        """Return where a sequence's final K/V end after the next forward."""
        if not self.kv.prefixes.has_turn(sequence):
            return 0
        if self._has_chunks(sequence):
            return Chunk.next(sequence, self.chunk).stop
        return sequence.block.final_stop

    def chunks(self, sequences: list[Sequence]) -> list[Chunk]:
        """Return the next chunk of each sequence, unless another sequence stores it."""
        found = []
        for sequence in sequences:
            self.skip_shared(sequence)
            if self._has_chunks(sequence) and self.kv.prefixes.has_turn(sequence):
                found.append(Chunk.next(sequence, self.chunk))
        return found

    def _has_chunks(self, sequence: Sequence) -> bool:
        policy, missing = sequence.policy, sequence.block.final_stop - sequence.kv.clean_end
        return policy.cache.keeps_prefix and missing > max(self.chunk, policy.causal_length)
