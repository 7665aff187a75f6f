"""The canvases of the running sequences, on the device.

A masked position holds the mask token's id, so that the model sees it, but only a flag says
what is masked: a mask id in a prompt is an ordinary token.

Letters: S slots, N positions of the longest canvas.
"""

from collections.abc import Sequence as Items
from typing import TYPE_CHECKING

import torch

from diffray.components.backend import send
from diffray.components.copies import Copy
from diffray.components.sequence import Sequence
from diffray.kernels import noise
from diffray.kernels.checksum import checksum
from diffray.workers.soft import SoftInputs

if TYPE_CHECKING:
    from diffray.workers.layout import Layout


MOST_COPIES = 16  # at a time


class Slots:
    """Token ids, mask flags, and when and how surely each token became final."""

    def __init__(
        self,
        num_slots: int,
        length: int,
        mask_token_id: int,  # below 0: none, because masks show noise
        device: torch.device,
        vocab_size: int = 0,  # for the noise
    ) -> None:
        # Canvases of sequences, of their copies without the prompt or with best tokens, and of
        # drafts; padding writes to the last row.
        shape = (2 * num_slots + MOST_COPIES + 1, length)
        self.num_slots = num_slots
        self.mask_token_id, self.vocab_size = mask_token_id, vocab_size
        self.length = length
        self.device = device
        self.ids_SN = torch.zeros(shape, dtype=torch.long, device=device)
        self.masked_SN = torch.zeros(shape, dtype=torch.bool, device=device)
        self.steps_SN = torch.zeros(shape, dtype=torch.long, device=device)
        self.logprobs_SN = torch.zeros(shape, dtype=torch.float32, device=device)
        self.soft = SoftInputs(shape[0], length, device)
        self.layout: Layout | None = None  # the last one, while it may still be valid
        self._free = list(range(num_slots - 1, -1, -1))
        self._free_copies = list(range(shape[0] - 2, num_slots - 1, -1))

    @property
    def nbytes(self) -> int:
        kept = self.ids_SN, self.masked_SN, self.steps_SN, self.logprobs_SN
        return sum(each.nbytes for each in kept)

    @property
    def num_free(self) -> int:
        return len(self._free)

    def has_room(self, sequence: Sequence) -> bool:
        """Whether a slot is free, and memory for the sequence's soft inputs, if it has any."""
        start, stop = sequence.soft_span
        soft = sequence.policy.iteration.soft
        return bool(self._free) and (not soft or self.soft.has_room(stop - start))

    @property
    def trash(self) -> int:
        """The flat index of a position that is never read."""
        return self.ids_SN.numel() - 1

    def admit(self, sequence: Sequence) -> None:
        """Give the sequence a slot, and one for each copy that it needs, and write its canvas."""
        sequence.slot = self._free.pop()
        if sequence.guided:
            sequence.uncond = self.lend_copy()
        if sequence.policy.iteration.renoises:
            sequence.best = self.lend_copy()
        self.write(sequence)
        if sequence.canvas.answer:  # of which tokens may be shown from the start, without a step
            self.steps_SN[sequence.slot], self.logprobs_SN[sequence.slot] = 0, 0
        if sequence.policy.iteration.soft:
            self.soft.enter(sequence.slot, *sequence.soft_span)

    def lend_copy(self) -> Copy:
        """Return a copy; nothing has been written on its canvas yet."""
        return Copy(self._free_copies.pop())

    def take_back(self, copy: Copy) -> None:
        self._free_copies.append(copy.slot)

    def write(self, sequence: Sequence) -> None:
        """Write a sequence's canvas: prompt, final tokens, masks, pinned tokens, suffix."""
        canvas = sequence.canvas.given(0, sequence.canvas.length)
        self._write(sequence.slot, canvas)
        if sequence.best is not None:  # its canvas shows noise
            first = max(sequence.block.start, sequence.canvas.prompt_len)
            shown = _first_noise(sequence.seed, first, sequence.canvas.length, self.vocab_size)
            self.ids_SN[sequence.slot, first : sequence.canvas.length] = send(
                torch.tensor(shown), self.device
            )
        if sequence.uncond is not None:
            first, last = sequence.canvas.prompt_len, sequence.canvas.blocks_stop
            after = [None] * (sequence.canvas.length - last)
            self._write(sequence.uncond.slot, [*[None] * first, *canvas[first:last], *after])

    def _write(self, slot: int, canvas: Items[int | None]) -> None:
        masked = [token is None for token in canvas]
        ids = [self.mask_token_id if token is None else token for token in canvas]
        both = send(torch.tensor([ids, masked]), self.device)
        self.ids_SN[slot] = self.mask_token_id
        self.ids_SN[slot, : len(canvas)] = both[0]
        self.masked_SN[slot] = False
        self.masked_SN[slot, : len(canvas)] = both[1].bool()

    def release(self, sequence: Sequence) -> None:
        """Take the slot and the copies back."""
        self.layout = None  # it may hold the sequence, its slot and its pages
        self.soft.leave(sequence.slot)
        self._free.append(sequence.slot)
        sequence.slot = -1
        if sequence.uncond is not None:
            self.take_back(sequence.uncond)
            sequence.uncond = None
        if sequence.best is not None:
            self.take_back(sequence.best)
            sequence.best = None

    def checksum(self, sequences: Items[Sequence]) -> int:
        """Return a checksum of these canvases; waits for the device."""
        slots = send(torch.tensor([s.slot for s in sequences], dtype=torch.long), self.device)
        longest = max((s.canvas.length for s in sequences), default=0)
        return int(checksum(self.ids_SN[slots, :longest], self.masked_SN[slots, :longest]))


def _first_noise(seed: int, start: int, stop: int, vocab_size: int) -> list[int]:
    """Return what these positions show before any step."""
    positions = torch.arange(start, stop)
    seeds, before = torch.full_like(positions, seed), torch.full_like(positions, -1)
    found: list[int] = noise.token_ids(seeds, positions, before, vocab_size).tolist()
    return found
