"""Sub-blocks: of each row only the masks of the first sub-block that has any are open.

Letters: B rows, L positions of the longest block.
"""

from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from diffray.components.backend import send
from diffray.components.block import Block
from diffray.components.sequence import Sequence
from diffray.workers.features.feature import Feature

if TYPE_CHECKING:
    from diffray.workers.batch_state import BatchState


class SubBlocks(Feature):
    """The number of each position's sub-block.

    Rows without sub-blocks count as one that is as long as the longest block.
    """

    fused = True

    @staticmethod
    def uses(sequence: Sequence) -> bool:
        return bool(sequence.policy.iteration.sub_block())

    def begin(self, rows: "BatchState") -> None:
        sizes = [row.sequence.policy.iteration.sub_block() for row in rows.rows]
        size_B = send(torch.tensor([size or rows.length for size in sizes]), rows.device)
        self.number_BL = torch.arange(rows.length, device=rows.device) // size_B.unsqueeze(1)

    def show(self, rows: "BatchState", block: Block) -> Block:
        masked_BL = block.masked_BL
        first_B1 = masked_BL.int().argmax(1, keepdim=True)
        in_first_BL = self.number_BL == self.number_BL.gather(1, first_B1)
        return replace(block, masked_BL=masked_BL & in_first_BL)
