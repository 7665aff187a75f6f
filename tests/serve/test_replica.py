"""A replica without a cluster: its service, and the metrics that Ray's exporter is given."""

from types import SimpleNamespace
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, Counter, Histogram
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


class RecordedGauge:
    """Ray's gauge, as far as it is used; Ray's own needs a cluster."""

    made: dict[str, "RecordedGauge"]

    def __init__(self, name: str, description: str, tag_keys: tuple[str, ...]) -> None:
        assert name not in self.made, "Ray drops what a second gauge of this name is given"
        assert ":" not in name, "Ray refuses the colon"
        self.tag_keys, self.values = set(tag_keys), dict[tuple[str, ...], float]()
        self.made[name] = self

    def set(self, value: float, tags: dict[str, str]) -> None:
        assert set(tags) == self.tag_keys
        self.values[tuple(tags.values())] = value


@pytest.fixture
def gauges(monkeypatch: pytest.MonkeyPatch) -> dict[str, RecordedGauge]:
    monkeypatch.setattr(replicas, "Gauge", RecordedGauge)
    monkeypatch.setattr(RecordedGauge, "made", made := dict[str, RecordedGauge](), raising=False)
    return made


def test_every_series_is_exported_again_with_its_new_value(gauges: dict[str, Any]) -> None:
    registry = CollectorRegistry()
    tokens = Counter("diffray:tokens", "Tokens.", ["replica", "tier"], registry=registry)
    seconds = Histogram("diffray:s", "Seconds.", ["replica"], buckets=(1, 5), registry=registry)
    exporter = replicas.Exporter()
    for tier in ("device", "host", "host"):
        tokens.labels("a", tier).inc(3)
        seconds.labels("a").observe(2)
        exporter.export(list(registry.collect()))
    assert {name: gauge.values for name, gauge in gauges.items()} == {
        "diffray_tokens_total": {("a", "device"): 3, ("a", "host"): 6},
        "diffray_s_bucket": {("a", "1.0"): 0, ("a", "5.0"): 3, ("a", "+Inf"): 3},
        "diffray_s_count": {("a",): 3},
        "diffray_s_sum": {("a",): 6},
    }


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
