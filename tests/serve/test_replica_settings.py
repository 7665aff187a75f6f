"""What a replica makes of its configuration, without a cluster."""

from types import SimpleNamespace
from typing import Any

import pytest

from diffray.cluster.serve import replica_service
from diffray.cluster.serve.app_config import AppConfig
from tests.helpers.files_server import files_server
from tests.helpers.recorder import Recorder


@pytest.mark.usefixtures("stored")
async def test_a_replica_fetches_images_from_the_hosts_of_its_configuration(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
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
