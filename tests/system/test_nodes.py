"""Replicas over several nodes, which all stand on this machine: placement, scaling, losses."""

import os
import signal
import time
from collections.abc import Iterator
from typing import Any

import pytest

from benchmarks.local_ray import local_cluster
from diffray import SamplingParams
from diffray.cluster.control.llm import DiffusionLLM
from diffray.cluster.serve.server import remove
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


@pytest.fixture(scope="module")
def scaled(url: str) -> Iterator[str]:
    """Start a model with one replica that soon becomes three under load, and soon one again."""
    scaling = {
        "max_replicas": 3,
        "target_ongoing_tokens": 400,
        "upscale_delay_s": 0,
        "downscale_delay_s": 1,
        "look_back_period_s": 10.1,
    }
    many = application(
        "many",
        engine_kwargs={"dtype": "float32", "max_num_seqs": 4},
        deployment_config={"health_check_period_s": 1, "autoscaling_config": scaling},
    )
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
