"""Replicas over several nodes, which all stand on this machine: placement, scaling, losses."""

import os
import signal
import threading
import time
from collections.abc import Iterator
from typing import Any

import httpx2
import pytest

from benchmarks.local_ray import local_cluster
from diffray import SamplingParams
from diffray.cluster.control.llm import DiffusionLLM
from diffray.cluster.serve.config_file import applications
from diffray.cluster.serve.server import Interrupted, deploy, remove
from tests.helpers.nodes import (
    MESSAGES,
    alive,
    application,
    ask,
    clients,
    seconds_until,
    serving,
    start,
    states,
)

pytestmark = pytest.mark.long

NODES = 4

# Serve hears of a replica's load every 10 s, and it forgets metrics for as long.
QUICK = {
    "RAY_SERVE_REPLICA_AUTOSCALING_METRIC_PUSH_INTERVAL_S": "0.5",
    "RAY_SERVE_HANDLE_AUTOSCALING_METRIC_PUSH_INTERVAL_S": "0.5",
}


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    """Start four nodes with room for one replica of one rank each."""
    with local_cluster([{"num_cpus": 2}] * NODES, QUICK), serving() as url:
        yield url


def growing(most: int) -> dict[str, Any]:
    """Return a deployment that soon has as many replicas as its load needs, and soon has one."""
    scaling = {
        "max_replicas": most,
        "target_ongoing_tokens": 400,
        "upscale_delay_s": 0,
        "downscale_delay_s": 1,
        "look_back_period_s": 10.1,
    }
    return {"health_check_period_s": 1, "autoscaling_config": scaling}


def test_a_replica_that_no_node_can_hold_spans_nodes_and_answers_the_same(url: str) -> None:
    wide = application(
        "wide",
        engine_kwargs={"tensor_parallel_size": 2, "dtype": "float64", "check_every": 1},
        placement_group_config={"strategy": "PACK"},
    )
    print(f"a replica over two nodes is ready after {start(wide):.1f} s")
    try:
        assert len(set(alive("Worker").values())) == 2
        wishes: dict[str, Any] = {"max_tokens": 32, "temperature": 0.8, "seed": 3}
        answer = ask(url, "wide", **wishes).json()["choices"][0]["message"]["content"]
    finally:
        remove(wide)
    with DiffusionLLM("demo", dtype="float64") as llm:
        (alone,) = llm.chat(MESSAGES, SamplingParams(**wishes))
    assert answer == alone.outputs[0].text
    seconds_until(lambda: not alive("Worker") and not alive("Coordinator"), 60)


def test_a_replica_that_must_not_span_nodes_waits_and_says_what_for(url: str) -> None:
    never = application(
        "never",
        engine_kwargs={"tensor_parallel_size": 2},
        deployment_config={"graceful_shutdown_timeout_s": 120},
    )
    said: list[str] = []
    stopped = threading.Event()

    def say(line: str) -> None:
        said.append(line)
        if line.startswith("Waiting"):
            stopped.set()

    try:
        with pytest.raises(Interrupted):
            deploy(never, say, stopped)
    finally:
        begin = time.monotonic()
        remove(never)
    assert time.monotonic() - begin < 60, "nothing runs that could be waited for"
    (told,) = (line for line in said if line.startswith("Waiting"))
    assert told.startswith(
        "Waiting: a replica needs 3 CPU on one node; the largest node has 2 CPU, and the cluster"
    )


def test_a_model_behind_a_door_scales_by_itself(url: str) -> None:
    engine = {"device": "cpu", "cpu_threads": 1, "max_num_seqs": 4}
    models: list[dict[str, Any]] = [
        {
            "model_loading_config": {"model_id": name, "model_source": "demo"},
            "engine_kwargs": engine,
        }
        for name in ("grows", "stays")
    ]
    wanted = applications([models[0] | {"deployment_config": growing(2)}, models[1]], "two")
    start(wanted)

    def ask_door(name: str, **options: Any) -> int:
        body = {"model": name, "messages": MESSAGES} | options
        assert states("stays") == {"RUNNING": 1}
        return httpx2.post(f"{url}/v1/chat/completions", json=body, timeout=120).status_code

    try:
        with (
            clients(1, lambda: ask_door("stays", max_tokens=8)) as few,
            clients(8, lambda: ask_door("grows", max_tokens=256, ignore_eos=True)) as many,
        ):
            up = seconds_until(lambda: states("grows") == {"RUNNING": 2}, 240)
            time.sleep(1)  # with both
        assert {*few, *many} == {200}
        down = seconds_until(lambda: states("grows") == {"RUNNING": 1}, 240)
        print(f"behind a door: two replicas after {up:.1f} s, one again after {down:.1f} s")
        assert states("stays") == {"RUNNING": 1}
    finally:
        remove(wanted)


@pytest.fixture(scope="module")
def scaled(url: str) -> Iterator[str]:
    """Start a model with one replica that may become three."""
    engine = {"dtype": "float32", "max_num_seqs": 4}
    many = application("many", engine_kwargs=engine, deployment_config=growing(3))
    print(f"a replica is ready after {start(many):.1f} s")
    yield "many"
    remove(many)


def test_replicas_come_with_the_load_and_go_without_an_error(url: str, scaled: str) -> None:
    long: dict[str, Any] = {"max_tokens": 256, "ignore_eos": True}
    with clients(8, lambda: ask(url, scaled, **long).status_code) as answers:
        up = seconds_until(lambda: states(scaled) == {"RUNNING": 3}, 180)
        assert len(set(alive("ServeReplica:many").values())) == 3, "on three nodes"
        time.sleep(1)  # with all three
    down = seconds_until(lambda: states(scaled) == {"RUNNING": 1}, 180)
    print(f"1 to 3 replicas in {up:.1f} s, back in {down:.1f} s, {len(answers)} answers")
    assert set(answers) == {200}
    seconds_until(lambda: len(alive("Worker")) == 1, 60)


def test_a_killed_replica_is_replaced_and_takes_its_ranks_with_it(url: str, scaled: str) -> None:
    family = {kind: set(alive(kind)) for kind in ("ServeReplica:many", "Coordinator", "Worker")}
    assert [len(pids) for pids in family.values()] == [1, 1, 1]
    (replica,) = family["ServeReplica:many"]
    os.kill(replica, signal.SIGKILL)
    others = family["Coordinator"] | family["Worker"]
    gone = seconds_until(lambda: not any(os.path.exists(f"/proc/{pid}") for pid in others), 60)
    noticed = seconds_until(lambda: states(scaled) != {"RUNNING": 1}, 60)
    again = seconds_until(lambda: states(scaled) == {"RUNNING": 1}, 180)
    print(f"ranks gone {gone:.1f} s, noticed {noticed:.1f} s, replaced {again:.1f} s after")
    assert ask(url, scaled, max_tokens=8).status_code == 200
    for kind, pids in family.items():
        assert len(alive(kind)) == 1 and not pids & alive(kind).keys()
