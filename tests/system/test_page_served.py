"""The page of a real server in a browser: three replicas behind HAProxy, below a path prefix."""

import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from benchmarks.serve_process import serve_process
from tests.helpers.browser import chromium
from tests.helpers.page import COMPLETE, FAILED, FINAL, ask, intercept, opened, watch_slowly

pytestmark = pytest.mark.long

PROMPT = "What is 12 plus 30?"
CONFIG = """
llm_configs:
  - model_loading_config: {model_id: demo}
    route_prefix: /models/demo
    engine_kwargs: {dtype: float64, device: cpu, cpu_threads: 1, max_num_seqs: 2}
    deployment_config: {num_replicas: 3, health_check_period_s: 1}
"""
LONG: dict[str, Any] = {"max_tokens": 384, "min_tokens": 384}


def test_an_answer_outlives_a_rank_and_says_that_its_replica_is_lost(tmp_path: Path) -> None:
    config = tmp_path / "models.yaml"
    config.write_text(CONFIG)
    with chromium() as tab, serve_process("--config", str(config)) as served:
        served.wait_for(" is ready at ", 1)
        end = time.monotonic() + 60
        while not any("haproxy" in line for line in served.processes().values()):
            assert time.monotonic() < end, served.processes()  # one replaces another meanwhile
            time.sleep(0.1)
        assert f"watch it at {served.url}/models/demo/\n" in served.said
        page = opened(tab, f"{served.url}/models/demo")
        page.choose("[name=pace]", "0")
        intercept(page, **LONG)
        watch_slowly(page, 384)

        ask(page, PROMPT)
        page.wait(f"{FINAL} > 8")
        os.kill(served.busiest("ray::Worker"), signal.SIGKILL)
        page.wait(f"{COMPLETE} || {FAILED} || {FINAL} === 384")
        page.wait("document.querySelector('#send').textContent === 'Send'")
        assert not page.evaluate(FAILED), page.text("[data-part=reason]")
        whole = page.text(".answer")
        served.wait_for("; 1 request continues on a new worker group", 1)

        page.click("#clear")
        ask(page, PROMPT)
        page.wait(f"{FINAL} > 8")
        os.kill(served.busiest("ray::ServeReplica:demo:Replica"), signal.SIGKILL)
        page.wait(FAILED)
        reason = page.text("[data-part=reason]")
        assert "again" in reason or "connection was lost" in reason
        assert reason.endswith("What arrived before is shown.")
        arrived = page.text(".answer")
        assert whole.startswith(arrived) and page.evaluate(FINAL) > 8
        page.click("[data-part=again]")
        page.wait(f"document.querySelector('.answer').textContent === {json.dumps(whole)}")
        assert not page.evaluate(FAILED), page.text("[data-part=reason]")
        page.take_complaints("net::ERR_INCOMPLETE_CHUNKED_ENCODING")
        assert page.complaints == []
