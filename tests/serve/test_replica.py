"""A replica without a cluster: its service, and calls of its siblings."""

from types import SimpleNamespace
from typing import Any

import pytest
from ray.exceptions import RayActorError

from diffray.cluster.serve import replica_service, replicas
from diffray.cluster.serve.app_config import AppConfig
from tests.helpers.files_server import files_server
from tests.helpers.recorder import Recorder


@pytest.mark.usefixtures("stored")
async def test_a_replica_fetches_images_of_allowed_hosts(monkeypatch: pytest.MonkeyPatch) -> None:
    own = SimpleNamespace(unique_id="own")
    context = SimpleNamespace(replica_id=own, deployment="demo", app_name="demo")
    serve = SimpleNamespace(get_replica_context=lambda: context)
    monkeypatch.setattr(replica_service, "serve", serve)
    monkeypatch.setattr(replica_service, "DeploymentHandle", lambda *_: None)
    engine: Any = Recorder()
    with files_server({"/image": b"content"}) as url:
        given = {
            "model_loading_config": {"model_id": "demo"},
            "api": {"allowed_media_domains": [url.removeprefix("http://")]},
        }
        config = AppConfig.model_validate(given)
        adapters = replica_service.adapters_of(config)
        service, _ = await replica_service.service_of(engine, config, adapters, "demo")
        assert await service._prompts._remote.read(f"{url}/image") == b"content"


class Answers:
    """A handle whose broadcasts have these outcomes, one after the other."""

    app_name = "some"

    def __init__(self, *outcomes: Any) -> None:
        self._outcomes = iter(outcomes)

    def broadcast(self, method: str) -> Any:
        return self

    async def results_async(self, *, return_exceptions: bool) -> Any:
        if isinstance(outcome := next(self._outcomes), Exception):
            raise outcome
        return outcome


async def test_while_a_replica_hangs_reports_are_those_last_known() -> None:
    found = [1, RayActorError(), 2]
    none_runs = RuntimeError("there is no replica")
    asked = replicas.Replicas(Answers(found, TimeoutError(), TimeoutError(), none_runs, found))
    assert await asked.look("about") == [1, 2]
    assert await asked.look("about") == [1, 2]
    assert await asked.ask("about") is None
    assert await asked.look("about") == []
    assert await asked.ask("about") == [1, 2]
