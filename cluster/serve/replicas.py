"""Calls of replicas, all at once or one for an ingress."""

import asyncio
import logging
from collections.abc import AsyncGenerator
from contextlib import aclosing, suppress
from dataclasses import dataclass
from typing import Any, Final

from ray.exceptions import ObjectLostError, RayActorError
from ray.serve.exceptions import BackPressureError, DeploymentUnavailableError
from ray.serve.handle import DeploymentHandle

from diffray.cluster.api.errors import ApiError, Json, unavailable
from diffray.cluster.control.engine_client import Load
from diffray.cluster.serve.deployment import REPLICA
from diffray.cluster.serve.proxy import TRIES

log = logging.getLogger("ray.serve")

_ANSWER_S = 8.0  # for replicas to answer


@dataclass(frozen=True, slots=True)
class About:
    """A replica's models, load and health."""

    models: list[Json]  # its model and LoRA adapters, as in /v1/models
    load: Load
    failure: str  # why it cannot answer requests, if so


class Replicas:
    """All running replicas of the deployment behind a handle."""

    def __init__(self, handle: Any) -> None:
        self._handle = handle
        self._known: dict[str, list[Any]] = {}  # by the method

    async def look(self, method: str) -> list[Any]:
        """Return what each replica reports; as last known while one hangs."""
        if (found := await self.ask(method)) is not None:
            self._known[method] = found
        return self._known.get(method, [])

    async def ask(self, method: str, *given: object, within: float = _ANSWER_S) -> list[Any] | None:
        """Call a method of every replica; return the results, or None if one is late.

        It starts no replica, even if none is running.
        """
        try:
            async with asyncio.timeout(within):
                # The first call connects the handle and waits for Serve's controller.
                response = await asyncio.to_thread(self._handle.broadcast, method, *given)
                answers = await response.results_async(return_exceptions=True)
        except TimeoutError:
            log.warning("a replica of %s does not answer", self._handle.app_name)
            return None
        except Exception as error:  # such as Serve's, if no replica is running
            log.warning("the replicas of %s do not answer: %s", self._handle.app_name, error)
            return []
        return [each for each in answers if not isinstance(each, BaseException)]


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
        self.seen = False  # whether a replica has described itself

    async def ask(self, method: str, *given: object) -> Json:
        """Call a method of the model's service and return its result."""
        async with aclosing(self._answers(method, *given)) as answers:
            return await anext(answers)

    async def stream(self, method: str, *given: object) -> AsyncGenerator[Json, None]:
        """Call a streaming method of the service; closing the generator cancels the call."""
        async with aclosing(self._answers(method, *given)) as answers:
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
            self._described, self.seen = about.models, True
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
