"""What the HTTP endpoint needs of the object it serves: one model, or a door to several."""

from collections.abc import AsyncGenerator
from typing import Protocol

from diffray.cluster.api.bodies import GenerationBody
from diffray.cluster.api.errors import ApiError, Json
from diffray.cluster.api.operations import Order
from diffray.cluster.control.engine_client import Load


class Answering(Protocol):
    """JSON objects in, JSON objects or an ApiError out."""

    async def whole(self, kind: type[GenerationBody], given: object) -> Json:
        """Answer a request of one of the APIs."""
        ...

    def stream(self, kind: type[GenerationBody], given: object) -> AsyncGenerator[Json, None]:
        """Yield the chunks of an answer; closing the generator cancels it."""
        ...


class Served(Answering, Protocol):
    """The same for all that an endpoint offers."""

    async def ask(self, path: str, given: object) -> Json:
        """Answer a question about tokens, with the model that the body or query names."""
        ...

    async def operate(self, order: Order) -> Json:
        """Carry out an operator's request."""
        ...

    async def models(self) -> Json: ...

    async def model(self, name: str) -> Json: ...

    async def health(self) -> Json:
        """Return details, if there are any; raise if no request can be answered."""
        ...

    async def load(self) -> Load: ...

    async def prometheus(self, *, vllm_names: bool) -> bytes: ...

    def count_refusal(self, error: ApiError) -> None:
        """Count a request that was refused or failed, unless it is counted already."""
        ...
