"""The process that answers an application's batches; Serve starts another one if it dies."""

import asyncio
from collections.abc import Mapping
from typing import Any, Final

from ray import serve
from ray.serve import Application

from diffray.cluster.api.batch_runner import BatchRunner
from diffray.cluster.api.batch_store import BatchStore
from diffray.cluster.api.settings import ApiSettings
from diffray.cluster.control.engine_client import EngineFailed
from diffray.cluster.serve.ingress import ingress_to

_NAME: Final = "Batches"


class BatchWorker:
    """The class that Serve starts; it answers with the replicas of `models`, by application."""

    async def __init__(self, place: str, models: Mapping[str, str]) -> None:  # type: ignore[misc]  # Serve awaits it
        served = await ingress_to(models)
        runner = BatchRunner(BatchStore(own_place(place)), served.whole, served.load)
        self._running = asyncio.create_task(runner.run())

    async def check_health(self) -> None:
        """Serve replaces a worker that raises here three times in a row."""
        if self._running.done():
            raise EngineFailed(f"batches are no longer answered: {self._running.exception()!r}")

    async def __del__(self) -> None:
        self._running.cancel()


def own_place(place: str) -> str:
    """Return where this application keeps its files: several may be given the same place."""
    return f"{place}/{serve.get_replica_context().app_name}"


def of_application(settings: ApiSettings) -> ApiSettings:
    """Return the settings of this application's endpoint."""
    if settings.files is None:
        return settings
    return settings.model_copy(update={"files": own_place(settings.files)})


def batch_workers(place: str | None, models: Mapping[str, str]) -> list[Application]:
    """Return the worker for batches that are kept at `place`; none without one."""
    if place is None:
        return []
    plain: Any = serve.deployment(BatchWorker)
    options = {"num_replicas": 1, "ray_actor_options": {"num_cpus": 0}, "health_check_period_s": 2}
    return [plain.options(name=_NAME, **options).bind(place, dict(models))]
