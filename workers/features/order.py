"""The features of requests, in the order in which a batch calls them."""

from typing import Final

from diffray.workers.features.branches import Branches
from diffray.workers.features.credit import Credit
from diffray.workers.features.drafts import Drafts
from diffray.workers.features.edits import Edits
from diffray.workers.features.feature import Feature
from diffray.workers.features.guidance import Guidance
from diffray.workers.features.image_inputs import ImageInputs
from diffray.workers.features.measuring import Measuring
from diffray.workers.features.rankings import Rankings
from diffray.workers.features.renoising import Renoising
from diffray.workers.features.soft import Soft
from diffray.workers.features.sub_blocks import SubBlocks

FEATURES: Final[tuple[type[Feature], ...]] = (
    ImageInputs,
    SubBlocks,
    Edits,
    Branches,
    Measuring,
    Renoising,
    Drafts,
    Guidance,
    Rankings,
    Credit,
    Soft,
)
