"""One replica of a model: its endpoint, its tokenizer, and the engine behind its coordinator."""

import asyncio
import logging
import os
from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing, contextmanager

from diffray.cluster.api.defaults import read_generation_defaults
from diffray.cluster.api.errors import ApiError, Json, as_api_error
from diffray.cluster.api.metrics import Snapshot
from diffray.cluster.api.service import Service
from diffray.cluster.control.engine_client import EngineFailed
from diffray.cluster.control.remote import RemoteEngine
from diffray.cluster.serve.app_config import AppConfig
from diffray.cluster.serve.autoscaling import ONGOING_TOKENS
from diffray.cluster.serve.replica_metrics import EXPORT_S, Exporter, Replicas
from diffray.components.checkpoints.checkpoint import resolve
from diffray.components.checkpoints.demos import examples
from diffray.workers.text import Tokenizer

log = logging.getLogger("ray.serve")

_service: Service | None = None  # of this process, for its endpoint


def current_service() -> Service:
    """Return the service of this process's replica."""
    if _service is None:
        raise EngineFailed("the model is being loaded; try again in a moment")
    return _service


class Replica:
    """The class that Serve starts, checks for health and load, and stops."""

    engine: RemoteEngine | None = None
    _exporting: asyncio.Task[None] | None = None

    async def __init__(self, config: AppConfig) -> None:  # type: ignore[misc]  # Serve awaits it
        global _service
        source = config.model_source
        self.engine = await RemoteEngine.start(source, config.engine_kwargs)
        path = resolve(source)
        tokenizer = Tokenizer.load(path, self.engine.limits.mask_token_id)
        replicas = Replicas()
        _service = Service(
            self.engine,
            tokenizer,
            (config.model_id,),
            diffusion=config.diffusion,
            defaults=config.generation_defaults.over(read_generation_defaults(path)),
            deadline=config.request_timeout_s,
            replica=replicas.own,
            others=replicas.snapshots,
            scheduling_policy=config.engine_kwargs.scheduling_policy,
            examples=examples(source),
        )
        _service.start()
        self._exporting = asyncio.create_task(_export(_service))
        log.info("%s is ready (replica %s, process %d)", config.model_id, replicas.own, os.getpid())

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
            async with aclosing(current_service().stream_chat(_streaming(body))) as chunks:
                async for chunk in chunks:
                    yield chunk

    async def stream_complete(self, body: Json) -> AsyncGenerator[Json, None]:
        """Yield the chunks of the answers to prompts, for `handle.options(stream=True)`."""
        with _api_errors():
            async with aclosing(current_service().stream_completion(_streaming(body))) as chunks:
                async for chunk in chunks:
                    yield chunk

    async def snapshot(self) -> Snapshot:
        """Return this replica's metrics, for the replica that was scraped."""
        return await current_service().snapshot()

    async def check_health(self) -> None:
        """Serve replaces a replica that raises here three times in a row."""
        assert self.engine is not None
        await self.engine.check_health()

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """Report the tokens still to be generated to the autoscaling policy."""
        assert self.engine is not None
        return {ONGOING_TOKENS: float(self.engine.ongoing_tokens)}

    async def __del__(self) -> None:
        """End the coordinator and its ranks; Serve calls it after the last request."""
        if self._exporting is not None:
            self._exporting.cancel()
            current_service().close()
        if self.engine is not None:
            await self.engine.close()


@contextmanager
def _api_errors() -> Iterator[None]:
    """Count errors, and raise them as ApiError, which callers can read."""
    try:
        yield
    except (ApiError, EngineFailed) as error:
        refusal = as_api_error(error)
        if _service is not None:
            _service.metrics.count("request_refused", label=str(refusal.status))
        raise refusal from None


def _streaming(body: object) -> object:
    return body | {"stream": True} if isinstance(body, dict) else body


async def _export(service: Service) -> None:
    exporter = Exporter()
    while True:
        try:
            exporter.export((await service.snapshot()).families)
        except Exception:
            log.exception("the metrics could not be exported to Ray")
        await asyncio.sleep(EXPORT_S)
