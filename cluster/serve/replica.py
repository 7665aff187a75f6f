"""One replica of a model: its endpoint, its tokenizer, and the engine behind its coordinator."""

import asyncio
import logging
import os
from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing, contextmanager
from importlib import import_module
from inspect import isawaitable
from typing import TYPE_CHECKING, Any, Final

from ray import serve

from diffray.cluster.api.bodies import ChatBody, CompletionBody
from diffray.cluster.api.errors import ApiError, Json, as_api_error
from diffray.cluster.api.metrics import Snapshot
from diffray.cluster.control.engine_client import EngineFailed
from diffray.cluster.control.remote import RemoteEngine
from diffray.cluster.frontend.output import Followed
from diffray.cluster.serve.address import PREFIX_ROUTED
from diffray.cluster.serve.app_config import AppConfig
from diffray.cluster.serve.deployment import ONGOING_TOKENS
from diffray.cluster.serve.replicas import About

if TYPE_CHECKING:
    from diffray.cluster.api.service import Service
    from diffray.cluster.serve.desired_state import EveryReplica

log = logging.getLogger("ray.serve")

# With torch and transformers: while a replica imports them, its ranks start.
_IMPORTED_LATER: Final = (
    "diffray.cluster.serve.replica_service",
    "diffray.cluster.api.http_app",
    "transformers.tokenization_utils_tokenizers",
)

_service: "Service | None" = None  # the service of this process, for its endpoint


def current_service() -> "Service":
    """Return the service of this process's replica."""
    if _service is None:
        raise EngineFailed("the model is being loaded; try again in a moment")
    return _service


class Replica:
    """The class that Serve starts, checks for health and load, and stops."""

    engine: RemoteEngine | None = None
    every: "EveryReplica | None" = None
    _keeping_up: asyncio.Task[None] | None = None

    async def __init__(self, config: AppConfig, deployed: str, batches: object = None) -> None:  # type: ignore[misc]  # Serve awaits it
        """Start the engine; `deployed` names the record of the desired state.

        Serve starts the worker for `batches` with the replicas.
        """
        global _service
        if config.deployment_config.prefix_routing and type(self) is not Replica:
            _check_that_proxies_know(serve.get_replica_context().app_name)
        starting = asyncio.create_task(
            RemoteEngine.start(config.model_source, config.engine_kwargs)
        )
        try:
            for module in _IMPORTED_LATER:
                await asyncio.to_thread(import_module, module)
            from diffray.cluster.serve.replica_service import adapters_of, service_of

            adapters = adapters_of(config)
            self.engine = await starting
        finally:
            if self.engine is None:  # otherwise its ranks would stay
                starting.cancel()
                await asyncio.wait([starting])
        _service, self.every = await service_of(self.engine, config, adapters, deployed)
        self._keeping_up = asyncio.create_task(self.every.keep_up())
        own = serve.get_replica_context().replica_id.unique_id
        log.info("%s is ready (replica %s, process %d)", config.model_id, own, os.getpid())

    # For handles: bodies and answers are those of the HTTP endpoints, errors are ApiErrors.

    async def chat(self, body: Json) -> Json:
        """Answer a conversation, as POST /v1/chat/completions does."""
        with _api_errors():
            return await current_service().chat(body)

    async def complete(self, body: Json) -> Json:
        """Answer prompts, as POST /v1/completions does."""
        with _api_errors():
            return await current_service().complete(body)

    async def stream_chat(self, body: Json) -> AsyncGenerator[Json, None]:
        """Yield the chunks of a conversation's answer, for `handle.options(stream=True)`."""
        with _api_errors():
            async with aclosing(current_service().stream(ChatBody, _streaming(body))) as chunks:
                async for chunk in chunks:
                    yield chunk

    async def stream_complete(self, body: Json) -> AsyncGenerator[Json, None]:
        """Yield the chunks of the answers to prompts, for `handle.options(stream=True)`."""
        with _api_errors():
            async with aclosing(
                current_service().stream(CompletionBody, _streaming(body))
            ) as chunks:
                async for chunk in chunks:
                    yield chunk

    async def follow(self, *asked: Any) -> AsyncGenerator[Followed, None]:
        """Yield a request's progress, for `AsyncDiffusionLLM`."""
        with _api_errors():
            async with aclosing(current_service().follow(*asked)) as found:
                async for each in found:
                    yield each

    async def ask(self, method: str, *given: object) -> AsyncGenerator[object, None]:
        """Call a method of the service, for the ingress: yield None at once, then what it returns.

        A refusal is yielded, because Serve logs raised errors with a traceback.
        """
        yield None  # tells the ingress that this replica has the request
        try:
            with _api_errors():
                found = getattr(current_service(), method)(*given)
                if isawaitable(found):
                    yield await found
                    return
                async with aclosing(found) as chunks:
                    async for chunk in chunks:
                        yield chunk
        except ApiError as refusal:
            yield refusal

    # Called on all replicas at once.

    async def snapshot(self) -> Snapshot:
        """Return this replica's metrics, for the replica or the ingress that was scraped."""
        return await current_service().snapshot()

    async def about(self) -> About:
        service, failure = current_service(), ""
        try:
            await service.health()
        except EngineFailed as error:
            failure = str(error)
        models = (await service.models())["data"]
        return About(models, await service.load(), failure)

    async def of_every(self, method: str, *given: object) -> object:
        """Call a method of `EveryReplica`, for the replica that an operator has asked."""
        assert self.every is not None
        return await getattr(self.every, method)(*given)

    async def check_health(self) -> None:
        """Serve replaces a replica that raises here three times in a row."""
        assert self.engine is not None and self.every is not None
        if self.every.failure:
            raise EngineFailed(self.every.failure)
        await self.engine.check_health()

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """Report the tokens still to be generated to the autoscaling policy."""
        assert self.engine is not None
        return {ONGOING_TOKENS: float(self.engine.ongoing_tokens)}

    async def __del__(self) -> None:
        """End the coordinator and its ranks; Serve calls it after the last request."""
        if self._keeping_up is not None:
            self._keeping_up.cancel()
            current_service().close()
        if self.engine is not None:
            await self.engine.close()


def _check_that_proxies_know(application: str) -> None:
    """Raise EngineFailed if proxies do not know that this application has prefix_routing."""
    if application not in os.environ.get(PREFIX_ROUTED, "").split():
        raise EngineFailed(
            f"prefix_routing needs {PREFIX_ROUTED}={application} in the environment of every node "
            "when Ray starts, because proxies read it; if several applications have it, list "
            "them all, separated by spaces"
        )


@contextmanager
def _api_errors() -> Iterator[None]:
    """Count errors, and raise them as ApiError, which callers can read."""
    try:
        yield
    except (ApiError, EngineFailed) as error:
        refusal = as_api_error(error)
        if _service is not None:
            _service.count_refusal(refusal)
        raise refusal from None


def _streaming(body: object) -> object:
    return body | {"stream": True} if isinstance(body, dict) else body
