"""What an engine can run, for processes that have no engine; does not import torch."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from diffray.components.lora import LoRA
from diffray.components.model_spec import ModelSpec
from diffray.workers.messages import Footprint

if TYPE_CHECKING:
    from diffray.components.sequence import Sequence


@dataclass(frozen=True, slots=True)
class Limits:
    """An engine's capacity and its model's facts, for processes that have no engine."""

    spec: ModelSpec
    context: int  # positions of the longest canvas
    max_num_seqs: int
    num_pages: int  # that can be handed out
    page_size: int
    eos_token_ids: tuple[int, ...]
    mask_token_id: int
    shares_prefixes: bool = False
    drafter: LoRA | None = None  # the checkpoint's own adapter, of masks

    def positions(self, *, guided: bool) -> int:
        """The most positions of a canvas that fits the context and the K/V memory."""
        pages = self.num_pages // (2 if guided else 1)
        return min(self.context, pages * self.page_size)

    def footprint(self, sequence: "Sequence") -> Footprint:
        policy = sequence.policy
        shared = self.shares_prefixes and policy.shares_prefixes
        return Footprint(
            pages=self.pages(sequence, sequence.block.kv_stop),
            most=self.pages(sequence, sequence.canvas.most_length),
            block=policy.causal_length if shared else 0,
            step=sequence.canvas.added_blocks * policy.block_length if policy.canvas_length else 1,
        )

    def pages(self, sequence: "Sequence", stop: int) -> int:
        """Return how many K/V pages the first `stop` positions take, on all that are `stored`."""
        return -(-stop // self.page_size) * sequence.num_stored
