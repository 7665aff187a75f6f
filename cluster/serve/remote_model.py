"""A door's client of a model in another application, over Serve's handle."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager, suppress
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
        self._whole, self._streams = handle.options(), handle.options(stream=True)
        described: Json = {
            "id": name, "object": "model", "created": 0, "owned_by": "diffray",
            "root": name, "parent": None, "max_model_len": None, "examples": [], "accepts": None,
            "weight_version": None, "policies": None,
        }  # fmt: skip
        self._described = [described]

    async def ask(self, method: str, *given: object) -> Json:
        """Call a method of the model's service and return its result."""
        for _ in range(TRIES):
            response = self._whole.ask.remote(method, *given)
            with suppress(_Lost):
                async with self._sent(response):
                    return _answer(await response)
        raise self._gone()

    async def stream(self, method: str, given: object) -> AsyncGenerator[Json, None]:
        """Call a streaming method of the service; closing the generator cancels the call."""
        started = False
        for _ in range(TRIES):
            response = self._streams.ask_stream.remote(method, given)
            with suppress(_Lost):
                async with self._sent(response):
                    async for chunk in response:
                        started = True
                        yield _answer(chunk)
                    return
            if started:
                raise unavailable(
                    "The replica was lost, so this answer is incomplete; send the request again."
                )
        raise self._gone()

    async def about(self) -> list[About]:
        """Return the models, load and health of each replica."""
        return await self.replicas.ask("about")

    async def described(self) -> list[Json]:
        """Return the model, then its LoRA adapters; as last known if no replica answers."""
        for about in await self.about():
            self._described = about.models
        return self._described

    @asynccontextmanager
    async def _sent(self, response: Any) -> AsyncIterator[None]:
        """Wait until a replica has taken a request; cancel it if the block fails."""
        try:
            async with asyncio.timeout(_PLACE_S):
                await response._fetch_future_result_async()
            yield
        except BaseException as error:
            with suppress(Exception):  # such as the same error
                response.cancel()
            raise self._translated(error) from None

    def _translated(self, error: BaseException) -> BaseException:
        match error:
            case RayActorError() | ObjectLostError():
                return _Lost()
            case asyncio.CancelledError() if not _is_cancelled():  # by a replica that shuts down
                return _Lost()
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


class _Lost(Exception):
    """A request's replica is gone."""


def _answer(found: Any) -> Json:
    if isinstance(found, ApiError):
        raise found
    answer: Json = found
    return answer


def _is_cancelled() -> bool:
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0
