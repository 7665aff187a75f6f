"""What operators may do to a running engine: the paths, their bodies, and who carries it out."""

from collections.abc import Callable
from typing import Final, Literal, NamedTuple, Protocol

from pydantic import Field

from diffray.cluster.api.bodies import Named, parse
from diffray.cluster.api.errors import Json, as_api_error
from diffray.cluster.api.messages import StrictModel
from diffray.cluster.control.engine_client import Load
from diffray.cluster.control.weight_changes import InFlight
from diffray.components.checkpoints.update import Source
from diffray.workers.messages import AWAKE

UPDATE_WEIGHTS: Final = "/update_weights_from_disk"  # SGLang's name
SLEEP, WAKE_UP, IS_SLEEPING = "/sleep", "/wake_up", "/is_sleeping"  # vLLM's
OPERATED: Final = (UPDATE_WEIGHTS, SLEEP, WAKE_UP, IS_SLEEPING)  # they need an operator's key


class Order(NamedTuple):
    """What an operator asks for: the path, and the body or the query as a JSON object."""

    path: str
    given: object


class ModelBody(StrictModel):
    """The query of POST /wake_up and GET /is_sleeping."""

    model: Named = None


class SleepBody(ModelBody):
    """The query of POST /sleep."""

    level: Literal[1, 2] = Field(
        1, description="1: give the K/V memory back; 2: that of the weights, too."
    )


class UpdateWeightsBody(ModelBody):
    """POST /update_weights_from_disk."""

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

    async def sleep(self, level: int) -> None:
        """Give memory back until it is woken with level 0; raises ValueError if it cannot wake."""
        ...

    async def load(self) -> Load: ...


_BODIES: Final[dict[str, type[ModelBody]]] = {
    UPDATE_WEIGHTS: UpdateWeightsBody,
    SLEEP: SleepBody,
    WAKE_UP: ModelBody,
    IS_SLEEPING: ModelBody,
}


async def carry_out(
    order: Order, operated: Operated, named: Callable[[str | None], object]
) -> Json:
    """Do what an operator asks for; return the answer, or raise ApiError.

    `named` refuses the name of a model that is not there.
    """
    body = parse(_BODIES[order.path], order.given)
    named(body.model)
    if order.path == IS_SLEEPING:
        return {"is_sleeping": (await operated.load()).sleep_level > AWAKE}
    try:
        if not isinstance(body, UpdateWeightsBody):
            await operated.sleep(body.level if isinstance(body, SleepBody) else AWAKE)
            return {}
        version = await operated.update_weights(
            body.model_path, body.in_flight, body.weight_version
        )
    except ValueError as error:
        raise as_api_error(error) from None
    message = f"The weights are those of {body.model_path}."
    return {"success": True, "message": message, "weight_version": version}
