"""What operators may do to a running engine: the paths, their bodies, and who carries it out."""

from typing import Final, Protocol

from pydantic import Field

from diffray.cluster.api.bodies import Named
from diffray.cluster.api.errors import Json, as_api_error
from diffray.cluster.api.messages import StrictModel
from diffray.cluster.control.weight_changes import InFlight
from diffray.components.checkpoints.update import Source

UPDATE_WEIGHTS: Final = "/update_weights_from_disk"  # SGLang's name
OPERATED: Final = (UPDATE_WEIGHTS,)  # paths that need an operator's key


class UpdateWeightsBody(StrictModel):
    """POST /update_weights_from_disk."""

    model: Named = None
    model_path: str = Field(
        min_length=1,
        description="A folder with the new weights that every replica can read, or a Hub id.",
    )
    weight_version: str | None = Field(
        None,
        min_length=1,
        max_length=200,
        description="The name of the new weights; without names versions count up from 0.",
    )
    in_flight: InFlight = Field(
        "finish",
        description="Whether answers that have begun finish on the old weights, or restart on the "
        "new ones if no token of theirs has been reported.",
    )


class Operated(Protocol):
    """What carries out an operator's wishes: an engine, or all replicas of a deployment."""

    async def update_weights(
        self, source: Source, in_flight: InFlight = "finish", version: str | None = None
    ) -> str:
        """Replace the weights; return their version. Raises ValueError with nothing changed."""
        ...


async def updated_weights(operated: Operated, body: UpdateWeightsBody) -> Json:
    """Replace the weights; return the answer, or raise ApiError."""
    try:
        version = await operated.update_weights(
            body.model_path, body.in_flight, body.weight_version
        )
    except ValueError as error:
        raise as_api_error(error) from None
    message = f"The weights are those of {body.model_path}."
    return {"success": True, "message": message, "weight_version": version}
