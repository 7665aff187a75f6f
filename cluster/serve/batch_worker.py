"""The process that answers an application's batches; Serve starts another one if it dies."""

import asyncio
from collections.abc import Mapping
from typing import Any, Final
from urllib.parse import quote

from ray import serve
from ray.serve import Application

from diffray.cluster.api.settings import ApiSettings
from diffray.cluster.control.engine_client import EngineFailed
from diffray.cluster.serve.ingress import ingress_to

_NAME: Final = "Batches"


class BatchWorker:
    """The class that Serve starts; it answers with the replicas of `models`, by application."""

    async def __init__(  # type: ignore[misc]  # Serve awaits it
        self, settings: ApiSettings, models: Mapping[str, str], folder: str
    ) -> None:
        from diffray.cluster.api.batch_runner import BatchRunner
        from diffray.cluster.api.batch_store import BatchStore

        served, settings = await ingress_to(models), with_own_files(settings, folder)
        assert settings.files is not None
        store = BatchStore(settings.files)
        try:
            await asyncio.to_thread(store.objects.write, "writable", b"")
        except OSError as error:
            raise EngineFailed(f"--files {settings.files} cannot be written: {error}") from None
        runner = BatchRunner(store, served, settings)
        self._running = asyncio.create_task(runner.run())

    async def check_health(self) -> None:
        """Serve replaces a worker that raises here three times in a row."""
        if self._running.done():
            raise EngineFailed(f"batches are no longer answered: {self._running.exception()!r}")

    async def __del__(self) -> None:
        self._running.cancel()


def with_own_files(settings: ApiSettings, folder: str = "") -> ApiSettings:
    """Return the settings with a folder of the application's own."""
    if settings.files is None:
        return settings
    own = quote(folder or serve.get_replica_context().app_name, safe="")
    return settings.model_copy(update={"files": f"{settings.files}/{own}"})


def batch_workers(
    settings: ApiSettings, models: Mapping[str, str], folder: str = ""
) -> list[Application]:
    """Return the worker for batches, if there is a place for their files."""
    if settings.files is None:
        return []
    plain: Any = serve.deployment(BatchWorker)
    options = {"num_replicas": 1, "ray_actor_options": {"num_cpus": 0}, "health_check_period_s": 2}
    return [plain.options(name=_NAME, **options).bind(settings, dict(models), folder)]
