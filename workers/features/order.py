"""The features of requests, in the order in which a batch calls them.

Logits are changed in this order too: by guidance, then by what requests add; soft inputs see both,
and credit adds to all. Rankings come before ZeroConfidence, which forbids tokens; the probabilities
of whole slots come after it.
"""

from typing import Final

from diffray.workers.features.credit import Credit
from diffray.workers.features.distributions import Distributions
from diffray.workers.features.drafts import Drafts
from diffray.workers.features.edits import Edits
from diffray.workers.features.feature import Feature
from diffray.workers.features.given_answers import GivenAnswers
from diffray.workers.features.guidance import Guidance
from diffray.workers.features.image_inputs import ImageInputs
from diffray.workers.features.logit_transforms import LogitTransforms
from diffray.workers.features.pinned_slots import PinnedSlots
from diffray.workers.features.rankings import Rankings
from diffray.workers.features.renoising import Renoising
from diffray.workers.features.self_speculation import Drafting
from diffray.workers.features.slot_lengths import SlotLengths
from diffray.workers.features.soft import Soft
from diffray.workers.features.structured import StructuredAnswers
from diffray.workers.features.sub_blocks import SubBlocks
from diffray.workers.features.zero_confidence import ZeroConfidence

FEATURES: Final[tuple[type[Feature], ...]] = (
    ImageInputs,
    SubBlocks,
    Edits,
    SlotLengths,
    Renoising,
    Drafting,
    Drafts,
    Guidance,
    LogitTransforms,
    Soft,
    Credit,
    StructuredAnswers,
    GivenAnswers,
    Rankings,
    ZeroConfidence,
    PinnedSlots,
    Distributions,
)
