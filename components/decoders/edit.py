"""LLaDA2.1's joint threshold: masks become tokens, and tokens already written may be replaced."""

from typing import TYPE_CHECKING, Any, ClassVar, Final, Literal

from pydantic import Field, model_validator

from diffray.components.decoder import Decoder

if TYPE_CHECKING:
    from torch import Tensor

    from diffray.components.block import Block, Proposal

_PRESETS: Final[dict[str, dict[str, float]]] = {  # of LLaDA2.1's model card
    "speed": {"threshold": 0.5, "edit_threshold": 0.0},
    "quality": {"threshold": 0.7, "edit_threshold": 0.5},
}


class Edit(Decoder):
    """Mask-to-token above `threshold`, token-to-token above `edit_threshold`, both strict.

    A step fills at least one mask, or its share of `steps_per_block`; if masks remain until the
    last of these, it ends the block. Otherwise up to `max_post_edit_steps` more steps may edit, but
    never more than the block has positions (or 32), until one changes nothing.
    """

    edits: ClassVar[bool] = True
    has_threshold: ClassVar[bool] = True

    kind: Literal["edit"] = "edit"
    preset: Literal["speed", "quality"] | None = Field(
        None, description="LLaDA2.1's modes: default thresholds of 0.5 and 0.0, or 0.7 and 0.5."
    )
    threshold: float = Field(0.5, ge=0, le=1, description="Masks are filled above this confidence.")
    edit_threshold: float = Field(0.0, ge=0, le=1, description="Tokens are replaced above this.")
    max_post_edit_steps: int = Field(16, ge=0, description="The most steps after the last mask.")
    steps_per_block: int | None = Field(
        None, ge=1, description="The most steps that fill a block's masks; default: no limit."
    )

    @model_validator(mode="before")
    @classmethod
    def _take_preset(cls, given: Any) -> Any:
        if not isinstance(given, dict):
            return given
        return _PRESETS.get(str(given.get("preset")), {}) | given

    def accept(self, proposal: "Proposal", block: "Block") -> "Tensor":
        confidence_BL = proposal.confidence_BL
        filled_BL = block.above(confidence_BL, self.threshold, self.steps_per_block)
        sure_BL = block.editable_BL & (confidence_BL > self.edit_threshold)
        return filled_BL | sure_BL & (proposal.ids_BL != block.ids_BL)

    def settle_steps(self) -> int:
        return self.max_post_edit_steps

    def last_step(self) -> int | None:
        return self.steps_per_block
