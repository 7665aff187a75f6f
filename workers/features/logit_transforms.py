"""Row transforms of requests: biases, penalties, allowed ids."""

from collections import defaultdict
from typing import TYPE_CHECKING

from diffray.components.row_transform import Planned, Step, Where
from diffray.components.sequence import Sequence
from diffray.components.transforms import KINDS
from diffray.workers.features.feature import Feature, StoredLogits

if TYPE_CHECKING:
    from diffray.workers.batch_plan import BatchPlan
    from diffray.workers.head_plan import BlockRows, HeadPlan


class LogitTransforms(Feature):
    """The transforms of all rows, by kind."""

    fused = True

    @staticmethod
    def uses(sequence: Sequence) -> bool:
        return bool(sequence.transforms)

    def plan_head(self, head: "HeadPlan") -> None:
        found: dict[type[Planned], list[Planned]] = defaultdict(list)
        for block in head.blocks_of(self):
            for transform in block.sequence.transforms:
                if planned := transform.plan(where(block)):
                    found[type(planned)].append(planned)
        self.planned = [kind.join(found[kind], head.device) for kind in KINDS if kind in found]

    def needs_logits(self, head: "HeadPlan") -> bool:
        return bool(self.planned)

    def read(self, plan: "BatchPlan", head: StoredLogits) -> None:
        step = Step(plan.slots.ids_SN, plan.slots.masked_SN)
        for planned in self.planned:
            planned.apply(head.logits, step)


def where(block: "BlockRows") -> Where:
    """Return what transforms are told about a block's rows."""
    return Where(block.span, block.positions_N, block.sequence)
