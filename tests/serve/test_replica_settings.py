"""What a replica makes of its configuration, without a cluster."""

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from diffray.cluster.serve import replica, replica_service
from diffray.cluster.serve.app_config import AppConfig
from diffray.cluster.serve.wanted import Wanted
from tests.helpers.files_server import files_server
from tests.helpers.recorder import Recorder


class Started(Recorder):
    """An engine that needs no ranks."""

    @classmethod
    async def start(cls, *given: object) -> "Started":
        return cls()


class NoRecord:
    """A record in which operators have asked for nothing."""

    def __init__(self, deployed: str) -> None: ...

    async def newest(self) -> Wanted:
        return Wanted()


async def forever(*given: object) -> None:
    await asyncio.Event().wait()


def test_a_replica_fetches_images_from_the_hosts_of_its_configuration(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    own = SimpleNamespace(unique_id="own")
    context = SimpleNamespace(replica_id=own, deployment="demo", app_name="demo")
    cluster: dict[str, Any] = {"RemoteEngine": Started, "export": forever, "_service": None}
    for name, stand_in in cluster.items():
        monkeypatch.setattr(replica, name, stand_in)
    monkeypatch.setattr(replica_service, "DeploymentHandle", lambda *_: None)
    monkeypatch.setattr(replica_service, "Record", NoRecord)
    for module in (replica, replica_service):
        serve = SimpleNamespace(get_replica_context=lambda: context)
        monkeypatch.setattr(module, "serve", serve)
    monkeypatch.delattr(replica.Replica, "__del__")  # Serve awaits it

    async def story(url: str) -> bytes:
        config = AppConfig.model_validate(
            {
                "model_loading_config": {"model_id": "demo"},
                "api": {"allowed_media_domains": [url.removeprefix("http://")]},
            }
        )
        made = object.__new__(replica.Replica)
        await made.__init__(config, "demo")  # type: ignore[misc]
        service = replica.current_service()
        try:
            return await service._prompts._remote.read(f"{url}/image")
        finally:
            for task in made._tasks:
                task.cancel()
            service.close()

    with files_server({"/image": b"content"}) as url:
        assert asyncio.run(story(url)) == b"content"
