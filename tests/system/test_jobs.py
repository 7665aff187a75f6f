"""A cluster as a team uses it: a model deployed from a file, and a batch as a job beside it."""

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest
import yaml
from ray import serve

from diffray.cluster.serve.config_file import applications, serve_config
from tools.local_ray import local_cluster
from tools.serve_process import free_port

pytestmark = pytest.mark.long

BIN = Path(sys.executable).parent
PATIENCE_S = 300.0  # on a machine that does other things too
MODEL: dict[str, Any] = {
    "model_loading_config": {"model_id": "demo"},
    "engine_kwargs": {"device": "cpu", "cpu_threads": 1, "max_num_seqs": 4},
    "generation_defaults": {"max_tokens": 16},
}
REQUESTS = [
    {
        "custom_id": f"question {number}",
        "method": "POST",
        "url": "/v1/chat/completions",
        "body": {
            "messages": [{"role": "user", "content": f"What is {number} plus 4?"}],
            "max_tokens": 16,
            "seed": number,
            "temperature": 0.8,
        },
    }
    for number in range(4)
]


@pytest.fixture(scope="module")
def dashboard() -> Iterator[str]:
    port = free_port()
    with local_cluster([{"num_cpus": 4, "include_dashboard": True, "dashboard_port": port}]):
        yield f"http://127.0.0.1:{port}"


def run(*command: str, folder: Path) -> str:
    ended = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=PATIENCE_S)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended.stdout + ended.stderr


def wait_for(wanted: str) -> Any:
    end = time.monotonic() + PATIENCE_S
    while (found := serve.status().applications.get("demo")) is None or found.status != wanted:
        assert found is None or found.status in ("NOT_STARTED", "DEPLOYING"), found
        assert time.monotonic() < end, found
        time.sleep(0.2)
    return found


def texts(answers: Path) -> dict[str, str]:
    found = [json.loads(line) for line in answers.read_text().splitlines()]
    assert all(line["response"]["status_code"] == 200 for line in found)
    return {
        line["custom_id"]: line["response"]["body"]["choices"][0]["message"]["content"]
        for line in found
    }


def test_serve_deploy_runs_a_generated_file(dashboard: str, tmp_path: Path) -> None:
    port = free_port()
    written = serve_config(applications(MODEL, "the test"))
    written |= {"proxy_location": "HeadOnly", "http_options": {"host": "127.0.0.1", "port": port}}
    (tmp_path / "serve.yaml").write_text(yaml.safe_dump(written))
    run(str(BIN / "serve"), "deploy", "serve.yaml", "--address", dashboard, folder=tmp_path)
    wait_for("RUNNING")
    body = {"messages": [{"role": "user", "content": "What is 12 plus 30?"}]}
    answer = httpx2.post(f"http://127.0.0.1:{port}/v1/chat/completions", json=body, timeout=60)
    assert answer.status_code == 200
    assert answer.json()["usage"]["completion_tokens"] <= 16, "the file's default"
    serve.shutdown()


def test_a_batch_is_a_job(dashboard: str, tmp_path: Path) -> None:
    folder = tmp_path / "work"
    folder.mkdir()
    (folder / "in.jsonl").write_text("".join(json.dumps(each) + "\n" for each in REQUESTS))
    batch = [str(BIN / "diffray"), "batch", "in.jsonl"]
    options = ["--model", "demo", "--dtype", "float64", "--device", "cpu"]
    mine, theirs = tmp_path / "direct.jsonl", tmp_path / "job.jsonl"
    run(*batch, str(mine), *options, folder=folder)
    submit = ["job", "submit", "--address", dashboard, "--working-dir", ".", "--"]
    said = run(str(BIN / "ray"), *submit, *batch, str(theirs), *options, folder=folder)
    assert "succeeded" in said and "4 requests: 4 answered, 0 failed" in said
    assert texts(theirs) == texts(mine)
    assert len(texts(mine)) == len(REQUESTS)
