"""A door's client of a model in another application, over Serve's handle."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing, suppress
from typing import Any, Final

from ray.exceptions import ObjectLostError, RayActorError
from ray.serve.exceptions import BackPressureError, DeploymentUnavailableError
from ray.serve.handle import DeploymentHandle

from diffray.cluster.api.errors import ApiError, Json, unavailable
from diffray.cluster.serve.deployment import REPLICA
from diffray.cluster.serve.ingress import TRIES
from diffray.cluster.serve.replicas import About, Replicas

_PLACE_S: Final = 30.0  # for a replica to take a request; the only one may be restarting


class RemoteModel:
    """Passes requests to the model's replicas, and raises the ApiErrors that they return.

    If a replica is lost before it has answered anything, another one gets the same request.
    """

    def __init__(self, name: str, application: str) -> None:
        """Connect to the application; this waits for Serve's controller."""
        handle: Any = DeploymentHandle(REPLICA, application)
        self.name, self.replicas = name, Replicas(handle)
        self._handle = handle.options(stream=True)
        described: Json = {
            "id": name, "object": "model", "created": 0, "owned_by": "diffray",
            "root": name, "parent": None, "max_model_len": None, "examples": [], "accepts": None,
            "weight_version": None, "policies": None,
        }  # fmt: skip
        self._described = [described]

    async def ask(self, method: str, *given: object) -> Json:
        """Call a method of the model's service and return its result."""
        async with aclosing(self._answers(method, *given)) as answers:
            return await anext(answers)

    async def stream(self, method: str, given: object) -> AsyncGenerator[Json, None]:
        """Call a streaming method of the service; closing the generator cancels the call."""
        async with aclosing(self._answers(method, given)) as answers:
            async for each in answers:
                yield each

    async def _answers(self, method: str, *given: object) -> AsyncGenerator[Json, None]:
        started = False
        for _ in range(TRIES):
            response = self._handle.ask.remote(method, *given)
            try:
                async with asyncio.timeout(_PLACE_S):
                    await anext(response)  # a replica has the request
                async for answer in response:
                    started = True
                    if isinstance(answer, ApiError):
                        raise answer
                    yield answer
                return
            except BaseException as error:
                with suppress(Exception):  # such as the same error
                    response.cancel()
                if (found := self._translated(error)) is not None:
                    raise found from None
            if started:
                raise unavailable(
                    "The replica was lost, so this answer is incomplete; send the request again."
                )
        raise self._gone()

    async def about(self) -> list[About]:
        """Return the models, load and health of each replica; as last known while one hangs."""
        return await self.replicas.look("about")

    async def described(self) -> list[Json]:
        """Return the model, then its LoRA adapters; as last known if no replica answers."""
        for about in await self.about():
            self._described = about.models
        return self._described

    def _translated(self, error: BaseException) -> BaseException | None:
        """Return what a call's error means for the client; None: its replica is lost."""
        match error:
            case RayActorError() | ObjectLostError():
                return None
            case asyncio.CancelledError() if not _is_cancelled():  # by a replica that shuts down
                return None
            case TimeoutError() | DeploymentUnavailableError():
                return self._gone()
            case BackPressureError(status_code=status, retry_after_s=seconds):
                code = "rate_limit_exceeded" if status == 429 else "engine_unavailable"
                message = f"Too many requests wait for {self.name}; try again."
                return ApiError(status, message, code=code, retry_after=seconds)
            case _:
                return error

    def _gone(self) -> ApiError:
        return unavailable(f"No replica of {self.name} could answer; try again.")


def _is_cancelled() -> bool:
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0
