"""The canvases of the running sequences, on the device.

A masked position holds the mask token's id, so that the model sees it, but only a flag says
what is masked: a mask id in a prompt is an ordinary token.

Letters: S slots, N positions of the longest canvas.
"""

from collections.abc import Sequence as Items
from typing import TYPE_CHECKING

import torch

from diffray.components.backend import send
from diffray.components.sequence import Sequence
from diffray.kernels.checksum import checksum
from diffray.workers.soft import SoftInputs

if TYPE_CHECKING:
    from diffray.workers.layout import Layout


class Slots:
    """Token ids, mask flags, and when and how surely each token became final."""

    def __init__(
        self, num_slots: int, length: int, mask_token_id: int, device: torch.device
    ) -> None:
        shape = (num_slots + 1, length)  # the last row takes what padding writes
        self.mask_token_id = mask_token_id
        self.length = length
        self.device = device
        self.ids_SN = torch.zeros(shape, dtype=torch.long, device=device)
        self.masked_SN = torch.zeros(shape, dtype=torch.bool, device=device)
        self.steps_SN = torch.zeros(shape, dtype=torch.long, device=device)
        self.logprobs_SN = torch.zeros(shape, dtype=torch.float32, device=device)
        self.soft = SoftInputs(num_slots, length, device)
        self.layout: Layout | None = None  # the last one, as long as it may hold
        self._free = list(range(num_slots - 1, -1, -1))

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def trash(self) -> int:
        """The flat index of a position that is never read."""
        return self.ids_SN.numel() - 1

    def admit(self, sequence: Sequence) -> None:
        """Give the sequence a slot and write its canvas: prompt, final tokens, masks, suffix."""
        slot = sequence.slot = self._free.pop()
        self.layout = None  # in it the sequence may have the slot and pages of another time
        known = [*sequence.prompt, *sequence.final]
        masks = [self.mask_token_id] * (sequence.blocks_stop - len(known))
        self.ids_SN[slot] = self.mask_token_id
        canvas = send(torch.tensor([*known, *masks, *sequence.suffix]), self.device)
        self.ids_SN[slot, : len(canvas)] = canvas
        self.masked_SN[slot] = False
        self.masked_SN[slot, len(known) : sequence.blocks_stop] = True
        if sequence.policy.iteration.soft:
            self.soft.enter(slot, sequence.length)

    def release(self, sequence: Sequence) -> None:
        """Take the slot back."""
        self.soft.leave(sequence.slot)
        self._free.append(sequence.slot)
        sequence.slot = -1

    def checksum(self, sequences: Items[Sequence]) -> int:
        """Return a checksum of these canvases; waits for the device."""
        slots = send(torch.tensor([s.slot for s in sequences], dtype=torch.long), self.device)
        longest = max((s.length for s in sequences), default=0)
        return int(checksum(self.ids_SN[slots, :longest], self.masked_SN[slots, :longest]))
