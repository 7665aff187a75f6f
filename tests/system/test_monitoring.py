"""The dashboard and the alerts with the real programs: `diffray serve`, Prometheus, and faults.

The durations of the alerts are shortened (tests/serve/alerts.yaml plays the real ones), thresholds
are as they are. The tests stand in an order: each brings a fault, and the last ends the server.
"""

import math
import os
import re
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from threading import Event
from typing import Any

import httpx2
import pytest
import yaml

from tests.helpers.monitoring import ALERTS, PANELS, RULES, VARIABLES, filled
from tests.helpers.needed import needed
from tests.helpers.served import MESSAGES, one_token_a_step, wait_until
from tools.serve_process import ServeProcess, free_port, serve_process

pytestmark = pytest.mark.long

SHORT = [  # in this order
    (r"\bfor: \d+m", "for: 2s"),
    (r"\[5m\]", "[20s]"),
    (r"\[15m\]", "[30s]"),
]
RUNS, WAITS, REPLICAS = 2, 4, 2  # requests of each replica
CONFIG = f"""
model_loading_config: {{model_id: demo}}
engine_kwargs: {{device: cpu, dtype: float32, cpu_threads: 1,
  max_num_seqs: {RUNS}, max_queued_requests: {WAITS}, time_slice: 0,
  kv_cache_memory: 7MB,  # 71 pages of 16 positions
  heartbeat_timeout_s: 60}}  # longer than ranks are stopped
deployment_config: {{num_replicas: {REPLICAS}, health_check_period_s: 1}}
"""
FIRES = {
    "slow steps": {"DiffrayQueueLong", "DiffrayRefusing", "DiffrayStepsSlow"},
    "late tokens": {"DiffrayFirstTokenSlow"},
    "long answers": {"DiffrayKVCacheFull"},
    "killed rank": {"DiffrayRankLost"},
    "killed replica": {"DiffrayReplicasShort"},
    "ended server": {"DiffrayDown", "DiffrayNoReplica"},
}
PAUSE_S = 0.2  # of a client between two requests
# 57 pages in the end, but few at first, so that two of them are admitted.
GROWING = {"decoder": "sequential", "canvas": "growing"}
LONG: dict[str, Any] = {"max_tokens": 896, "min_tokens": 896, "diffusion": GROWING}


@dataclass(frozen=True)
class Watched:
    """A server, and the Prometheus that watches it."""

    server: ServeProcess
    prometheus: str

    def asked(self, query: str) -> list[dict[str, Any]]:
        """Return a query's numbers, with their labels; those that are not finite are left out."""
        answer = httpx2.get(f"{self.prometheus}/api/v1/query", params={"query": query}).json()
        assert answer["status"] == "success", (query, answer)
        found: list[dict[str, Any]] = answer["data"]["result"]
        return [each for each in found if math.isfinite(float(each["value"][1]))]

    def alerts(self) -> list[dict[str, Any]]:
        answer = httpx2.get(f"{self.prometheus}/api/v1/alerts").json()
        return [each for each in answer["data"]["alerts"] if each["state"] == "firing"]

    def wait_for(self, fault: str) -> None:
        """Wait until all alerts of a fault have fired, and have said something whole."""
        seen = set[str]()

        def fired() -> bool:
            for alert in self.alerts():
                seen.add(alert["labels"]["alertname"])
                told = " ".join(alert["annotations"].values())
                assert not re.search(r"\{\{|<no value>|<error|%!|: \.", told), told
            return seen >= FIRES[fault]

        wait_until(fired)

    def post(self, **wishes: Any) -> int:
        """Return the status of a chat's answer; 0 if the connection broke."""
        body = {"model": "demo", "messages": MESSAGES} | wishes
        with suppress(httpx2.TransportError):
            return httpx2.post(
                f"{self.server.url}/v1/chat/completions", json=body, timeout=120
            ).status_code
        return 0

    @contextmanager
    def clients(self, count: int, **wishes: Any) -> Iterator[None]:
        """Ask all the time, from this many clients."""
        done = Event()

        def ask() -> None:
            while not done.wait(PAUSE_S):
                self.post(**wishes)

        with ThreadPoolExecutor(count) as pool:
            for _ in range(count):
                pool.submit(ask)
            try:
                yield
            finally:
                done.set()

    def pids(self, name: str) -> list[int]:
        return [pid for pid, line in self.server.processes().items() if name in line]


@contextmanager
def prometheus(folder: Path, target: str) -> Iterator[str]:
    """Run Prometheus on a server, with the alerts' durations shortened; return its address."""
    rules = ALERTS.read_text()
    for long, short in SHORT:
        assert re.search(long, rules), long
        rules = re.sub(long, short, rules)
    (folder / "alerts.yaml").write_text(rules)
    config = {
        "global": {"scrape_interval": "1s", "evaluation_interval": "1s"},
        "rule_files": ["alerts.yaml"],
        "scrape_configs": [{"job_name": "diffray", "static_configs": [{"targets": [target]}]}],
    }
    (folder / "prometheus.yml").write_text(yaml.safe_dump(config))
    listens = f"127.0.0.1:{free_port()}"
    command = [
        needed("prometheus"), f"--config.file={folder}/prometheus.yml", "--log.level=warn",
        f"--storage.tsdb.path={folder}/data", f"--web.listen-address={listens}",
    ]  # fmt: skip
    process = subprocess.Popen(command)
    try:
        yield f"http://{listens}"
    finally:
        process.terminate()
        process.wait(60)


@pytest.fixture(scope="module")
def watched(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Watched]:
    needed("prometheus")
    folder = tmp_path_factory.mktemp("monitoring")
    (folder / "demo.yaml").write_text(CONFIG)
    with serve_process("--config", str(folder / "demo.yaml")) as server:
        server.wait_for(" is ready at ", 1)
        with prometheus(folder, f"127.0.0.1:{server.port}") as address:
            found = Watched(server, address)

            def all_there() -> bool:
                with suppress(httpx2.TransportError):
                    return len(found.asked("diffray:min_replicas")) == REPLICAS
                return False

            wait_until(all_there)
            yield found


def calm(watched: Watched) -> Callable[[], bool]:
    """Return whether nothing fires and all replicas are there, with nothing to do."""
    busy = "sum(diffray:num_requests_running + diffray:num_requests_waiting) > 0"
    return lambda: (
        not watched.alerts()
        and len(watched.asked("diffray:min_replicas")) == REPLICAS
        and not watched.asked(busy)
    )


def test_every_alert_has_a_fault() -> None:
    assert {rule["alert"] for rule in RULES} == set().union(*FIRES.values())


def test_every_panel_shows_something_and_no_alert_fires(watched: Watched) -> None:
    models, replicas = (
        {each["metric"][label] for each in watched.asked(filled(query, "15s"))}
        for name in ("model", "replica")
        for query, label in re.findall(r"label_values\((.*), (\w+)\)", VARIABLES[name]["query"])
    )
    assert models == {"demo"} and len(replicas) == REPLICAS
    drafted = one_token_a_step(64)
    drafted["diffusion"]["speculation"] = {"kind": "verify"}
    queries = [(t["expr"], t["legendFormat"]) for panel in PANELS for t in panel["targets"]]
    with watched.clients(2, **drafted):
        for chosen in ({}, {"model": "demo", "replica": "|".join(replicas)}):
            left = {(filled(query, "15s", **chosen), legend) for query, legend in queries}
            end = time.monotonic() + 120
            while left:
                found = {each: watched.asked(each[0]) for each in left}
                left = {each for each in left if not found[each]}
                for (query, legend), series in found.items():
                    for one in series:
                        named = {*re.findall(r"\{\{(\w+)\}\}", legend)}
                        assert named <= one["metric"].keys(), query
                assert time.monotonic() < end, left
                time.sleep(0.5)
        assert watched.alerts() == []


@contextmanager
def hobbled(pids: list[int], stopped_s: float, runs_s: float) -> Iterator[None]:
    """Let processes run for a moment from time to time only."""
    done = Event()

    def hobble() -> None:
        while not done.is_set():
            for pid in pids:
                os.kill(pid, signal.SIGSTOP)
            done.wait(stopped_s)
            for pid in pids:
                os.kill(pid, signal.SIGCONT)
            time.sleep(runs_s)

    with ThreadPoolExecutor(1) as pool:
        stopping = pool.submit(hobble)
        try:
            yield
        finally:
            done.set()
    stopping.result()


@pytest.mark.parametrize(
    ("fault", "stopped_s", "runs_s"),
    [
        ("slow steps", 3.0, 0.03),  # there is time for a step or two
        ("late tokens", 12.0, 0.5),  # or for all that wait
    ],
)
def test_slow_ranks_are_told(watched: Watched, fault: str, stopped_s: float, runs_s: float) -> None:
    wait_until(calm(watched))
    ranks = watched.pids("ray::Worker")
    assert len(ranks) == REPLICAS
    asking = watched.clients(2 * REPLICAS * (RUNS + WAITS), max_tokens=4)
    with asking, hobbled(ranks, stopped_s, runs_s):
        watched.wait_for(fault)


def test_long_answers_fill_the_pages(watched: Watched) -> None:
    wait_until(calm(watched))
    with watched.clients(REPLICAS * RUNS, **LONG):
        watched.wait_for("long answers")


@pytest.mark.parametrize(
    ("process", "counted"),
    [("ray::Worker", "num_restarts"), ("ray::Coordinator", "num_coordinator_restarts")],
)
def test_a_killed_rank_or_coordinator_is_told(watched: Watched, process: str, counted: str) -> None:
    wait_until(calm(watched))
    os.kill(watched.pids(process)[0], signal.SIGKILL)
    watched.wait_for("killed rank")
    assert watched.asked(f"diffray:{counted}_total > 0")
    assert watched.post(max_tokens=4) == 200


def test_a_killed_replica_is_missed_until_another_is_there(watched: Watched) -> None:
    wait_until(calm(watched))
    os.kill(watched.pids("ray::ServeReplica:demo:Replica")[0], signal.SIGKILL)
    watched.wait_for("killed replica")
    wait_until(calm(watched))


def test_a_server_that_ended_is_down(watched: Watched) -> None:
    watched.server.interrupt()
    watched.wait_for("ended server")
