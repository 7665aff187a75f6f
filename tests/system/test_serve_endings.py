"""`diffray serve` on a cluster of others, and behind HAProxy."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest
import ray
from openai import OpenAI
from ray._private.state import actors

from tools.local_ray import SETTINGS, local_cluster
from tools.serve_process import ServeProcess, free_port, serve_process

pytestmark = pytest.mark.long

MESSAGES: Any = [{"role": "user", "content": "What is 12 plus 30?"}]
WIDE = """
model_loading_config: {model_id: wide, model_source: demo}
engine_kwargs: {device: cpu, tensor_parallel_size: 8}
route_prefix: /wide
"""


@pytest.fixture(scope="module")
def cluster() -> Iterator[str]:
    with local_cluster([{"num_cpus": 4}]):
        yield ray.get_runtime_context().gcs_address


def first_text(served: ServeProcess, **options: Any) -> str:
    with OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0) as client:
        stream = client.chat.completions.create(
            model="demo", messages=MESSAGES, stream=True, **options
        )
        for chunk in stream:
            if chunk.choices and (text := chunk.choices[0].delta.content):
                return str(text)
    raise AssertionError("the stream ended without text")


def replicas() -> list[str]:
    kinds = ("ServeReplica", "Coordinator", "Worker")
    living = (a["ActorClassName"] for a in actors().values() if a["State"] == "ALIVE")
    return [name for name in living if name.startswith(kinds)]


def test_a_cluster_of_others_serves_and_lives_on(cluster: str, tmp_path: Path) -> None:
    port, address = free_port(), ("--address", cluster)
    quick: dict[str, Any] = {"port": port, "settings": SETTINGS}
    with serve_process("demo", "--device", "cpu", *address, **quick) as served:
        served.wait_for(" is ready at ", 1)
        assert first_text(served, max_tokens=24)
        assert f"Ray is at {cluster}\n" in served.said
        names = [each["name"] for each in ray.util.list_named_actors(all_namespaces=True)]
        (replica,) = (name for name in names if name.startswith("SERVE_REPLICA"))
        for part in ("coordinator", "rank 0"):
            (name,) = (name for name in names if name.startswith(f"demo {part} of "))
            assert replica in name
        with serve_process("demo", "--served-model-name", "same", *address, **quick) as refused:
            assert refused.process.wait(120) == 1
            assert refused.said.count("\n") == 1, refused.said
            assert "used by application" in refused.said and "route_prefix" in refused.said
        config = tmp_path / "wide.yaml"
        config.write_text(WIDE)
        with serve_process("--config", str(config), *address, **quick) as waiting:
            waiting.wait_for("Waiting: ", 1)
            assert "a replica needs 9 CPU" in waiting.said
            waiting.interrupt()
            assert waiting.process.wait(120) == 0
        assert first_text(served, max_tokens=24), "the other model answers still"
        served.interrupt()
        assert served.process.wait(120) == 0
        assert "Traceback" not in served.said
    assert replicas() == []
    assert ray.cluster_resources()["CPU"] == 4, "the cluster is not ours to end"


@pytest.mark.parametrize("haproxy", [False, True])
def test_an_answer_has_one_request_id_behind_either_proxy(haproxy: bool) -> None:
    settings = {"RAY_SERVE_ENABLE_HA_PROXY": "1"} if haproxy else {}
    with serve_process("demo", "--device", "cpu", settings=settings) as served:
        served.wait_for(" is ready at ", 1)
        assert any("bin/haproxy" in line for line in served.processes().values()) == haproxy
        for given in (dict[str, str](), {"X-Request-Id": "mine-7"}):
            answer = httpx2.get(f"{served.url}/v1/models", headers=given)
            (request_id,) = answer.headers.get_list("x-request-id")
            assert request_id == given.get("X-Request-Id", request_id)
