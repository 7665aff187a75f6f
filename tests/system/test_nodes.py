"""Replicas over several nodes, which all stand on this machine: placement, scaling, losses.

Behind Serve's own proxy. The tests stand in an order, since they share the nodes.
"""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx2
import pytest
import ray
from prometheus_client.parser import text_string_to_metric_families
from ray import serve

from diffray import SamplingParams
from diffray.cluster.api.errors import ApiError
from diffray.cluster.control.llm import DiffusionLLM
from diffray.cluster.serve.server import remove
from tests.helpers.nodes import (
    MESSAGES,
    alive,
    application,
    ask,
    clients,
    serving,
    start,
    states,
    wait_until,
)
from tests.helpers.served import pieces_of, text_of
from tools.local_ray import MEMORY, local_cluster

pytestmark = pytest.mark.long

NODES = 4
DRAINS = 60  # seconds that a node may take to drain; k8s/ has more
LONG: dict[str, Any] = {
    "max_tokens": 96,
    "ignore_eos": True,
    "diffusion": {"block_length": 32, "decoder": {"kind": "fixed", "steps": 96}},
}
DEPLOYMENT = {"num_replicas": 2, "health_check_period_s": 1, "health_check_timeout_s": 2}
ENGINE = {"dtype": "float64", "max_num_seqs": 4}


# Serve hears of a replica's load every 10 s, and it forgets metrics for as long.
QUICK = {
    "RAY_SERVE_FORCE_STOP_UNHEALTHY_REPLICAS": "1",
    "RAY_SERVE_REPLICA_AUTOSCALING_METRIC_PUSH_INTERVAL_S": "0.5",
    "RAY_SERVE_HANDLE_AUTOSCALING_METRIC_PUSH_INTERVAL_S": "0.5",
}


@contextmanager
def pod() -> Iterator[subprocess.Popen[bytes]]:
    """Start a node with two CPUs as KubeRay does, in a process that stays until it is ended."""
    address = ray.get_runtime_context().gcs_address
    command = [
        str(Path(sys.executable).with_name("ray")), "start", "--block", f"--address={address}",
        "--num-cpus=2", f"--object-store-memory={MEMORY}", "--dashboard-agent-listen-port=0",
    ]  # fmt: skip
    settings = {"RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S": str(DRAINS)}
    nodes = len(ray.nodes())
    process = subprocess.Popen(command, env=os.environ | settings, start_new_session=True)
    try:
        wait_until(lambda: len(ray.nodes()) > nodes, 60)
        yield process
    finally:
        process.terminate()
        process.wait(DRAINS + 30)


def test_a_node_that_terminates_finishes_its_answers_and_a_replica_starts_elsewhere() -> None:
    """A pod gets SIGTERM; Ray drains the node, so the pods of `k8s/` have no `preStop`."""
    with local_cluster([{"num_cpus": 0}]), serving() as url:
        wanted = application(
            "pods",
            engine_kwargs={"dtype": "float64", "max_num_seqs": 4},
            deployment_config={"graceful_shutdown_timeout_s": DRAINS / 2},
        )
        long: dict[str, Any] = {"max_tokens": 256, "ignore_eos": True}
        with pod() as first:
            start(wanted)
            (node,) = alive("Worker").values()
            with pod():
                with clients(4, lambda: text_of(ask(url, "pods", **long))) as answers:

                    def wait_for_more() -> None:
                        before = len(answers)
                        wait_until(lambda: len(answers) > before + 4, 60)

                    wait_for_more()
                    begin = time.monotonic()
                    first.send_signal(signal.SIGTERM)
                    first.wait(DRAINS + 30)
                    took = time.monotonic() - begin
                    wait_until(lambda: states("pods") == {"RUNNING": 1}, 60)
                    wait_for_more()
                    assert set(alive("Worker").values()).isdisjoint({node})
                remove(wanted)
    assert len(set(answers)) == 1
    assert took < DRAINS, "Ray gave up waiting for the node"


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
    start(wide)
    try:
        assert len(set(alive("Worker").values())) == 2
        wishes: dict[str, Any] = {"max_tokens": 32, "temperature": 0.8, "seed": 3}
        answer = ask(url, "wide", **wishes).json()["choices"][0]["message"]["content"]
    finally:
        remove(wide)
    with DiffusionLLM("demo", dtype="float64") as llm:
        (alone,) = llm.chat(MESSAGES, SamplingParams(**wishes))
    assert answer == alone.outputs[0].text
    wait_until(lambda: not alive("Worker") and not alive("Coordinator"), 60)


@pytest.fixture(scope="module")
def scaled(url: str) -> Iterator[str]:
    """Start a model with one replica that soon becomes three under load, and soon one again."""
    scaling = {
        "max_replicas": 3, "target_ongoing_tokens": 400, "upscale_delay_s": 0,
        "downscale_delay_s": 1, "look_back_period_s": 10.1,
    }  # fmt: skip
    many = application(
        "many",
        engine_kwargs={"dtype": "float32", "max_num_seqs": 4},
        deployment_config={"health_check_period_s": 1, "autoscaling_config": scaling},
    )
    start(many)
    yield "many"
    remove(many)


def test_replicas_come_with_the_load_and_go_without_an_error(url: str, scaled: str) -> None:
    long: dict[str, Any] = {"max_tokens": 256, "ignore_eos": True}
    with clients(8, lambda: ask(url, scaled, **long).status_code) as answers:
        wait_until(lambda: states(scaled) == {"RUNNING": 3}, 180)
        assert len(set(alive("ServeReplica:many").values())) == 3, "on three nodes"
        time.sleep(1)  # with all three
    wait_until(lambda: states(scaled) == {"RUNNING": 1}, 180)
    assert set(answers) == {200}
    wait_until(lambda: len(alive("Worker")) == 1, 60)


def test_a_killed_replica_is_replaced_and_takes_its_ranks_with_it(url: str, scaled: str) -> None:
    family = {kind: set(alive(kind)) for kind in ("ServeReplica:many", "Coordinator", "Worker")}
    assert [len(pids) for pids in family.values()] == [1, 1, 1]
    (replica,) = family["ServeReplica:many"]
    os.kill(replica, signal.SIGKILL)
    others = family["Coordinator"] | family["Worker"]
    wait_until(lambda: not any(os.path.exists(f"/proc/{pid}") for pid in others), 60)
    wait_until(lambda: states(scaled) != {"RUNNING": 1}, 60)
    wait_until(lambda: states(scaled) == {"RUNNING": 1}, 180)
    assert ask(url, scaled, max_tokens=8).status_code == 200
    for kind, pids in family.items():
        assert len(alive(kind)) == 1 and not pids & alive(kind).keys()


@pytest.fixture(scope="module")
def served(url: str) -> Iterator[str]:
    wanted = application("two", engine_kwargs=ENGINE, deployment_config=DEPLOYMENT)
    start(wanted)
    yield "two"
    remove(wanted)


@pytest.fixture(scope="module")
def text() -> str:
    with DiffusionLLM("demo", dtype="float64") as llm:
        (alone,) = llm.chat(MESSAGES, SamplingParams(**LONG), use_tqdm=False)
        return alone.outputs[0].text


def streamed(url: str, name: str) -> tuple[str, str]:
    body = {"model": name, "messages": MESSAGES} | LONG
    *pieces, end = pieces_of(f"{url}/{name}/v1/chat/completions", body, {})
    return "".join(pieces), end


def test_a_handle_answers_as_the_endpoint_does(url: str, served: str, text: str) -> None:
    handle: Any = serve.get_app_handle(served)
    body: dict[str, Any] = {"messages": MESSAGES} | LONG
    answer = handle.chat.remote(body).result(timeout_s=120)
    assert answer["choices"][0]["message"]["content"] == text
    assert answer["usage"] == ask(url, served, **LONG).json()["usage"]
    chunks = list(handle.options(stream=True).stream_chat.remote(body))
    pieces = [choice["delta"].get("content") for chunk in chunks for choice in chunk["choices"]]
    assert "".join(piece or "" for piece in pieces) == text
    prompt = {"prompt": "7 times 6", "max_tokens": 8}
    (whole,) = handle.complete.remote(prompt).result(timeout_s=120)["choices"]
    parts = handle.options(stream=True).stream_complete.remote(prompt)
    assert "".join(c["text"] for part in parts for c in part["choices"]) == whole["text"]

    wrong = {"max_token": 3}
    refused = ask(url, served, **wrong)
    with pytest.raises(ApiError) as error:
        handle.chat.remote({"messages": MESSAGES} | wrong).result(timeout_s=60)
    assert error.value.status == refused.status_code == 400
    assert error.value.body == refused.json()
    with pytest.raises(ApiError) as late:
        list(handle.options(stream=True).stream_chat.remote({"messages": MESSAGES} | wrong))
    assert late.value.message == error.value.message


Series = dict[tuple[str, tuple[tuple[str, str], ...]], float]


def scraped(url: str) -> Series:
    """Return every series of /metrics; a name has all its series together, in one family."""
    families = list(text_string_to_metric_families(httpx2.get(f"{url}/metrics").text))
    assert len({family.name for family in families}) == len(families)
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in families
        if family.type in ("counter", "histogram")
        for sample in family.samples
        if not sample.name.endswith("_created")
    }


def total(series: Series, name: str) -> float:
    return sum(value for (each, _), value in series.items() if each == f"diffray:{name}")


def answered(series: Series) -> set[str]:
    return {
        dict(labels)["replica"]
        for (name, labels), value in series.items()
        if name.endswith("success_total") and value
    }


def test_counters_are_those_of_all_replicas(url: str, served: str) -> None:
    """Whichever replica a scrape gets: no counter falls, and what they grow by has happened."""
    url = f"{url}/{served}"
    wish = {"model": served, "messages": MESSAGES, "max_tokens": 24, "ignore_eos": True}
    scrapes, usages = [scraped(url)], list[dict[str, int]]()
    end = time.monotonic() + 120
    with ThreadPoolExecutor(4) as pool:
        while len(answered(scrapes[-1])) < 2 or len(usages) < 16:
            assert time.monotonic() < end, "a replica gets no requests"
            asked = [
                pool.submit(httpx2.post, f"{url}/v1/chat/completions", json=wish, timeout=120)
                for _ in range(4)
            ]
            while not all(each.done() for each in asked):
                scrapes.append(scraped(url))
            usages += [each.result().json()["usage"] for each in asked]
            scrapes += [scraped(url) for _ in range(4)]
    for before, after in pairwise(scrapes):
        assert not [key for key, value in before.items() if after.get(key, -1.0) < value]
    for name, grown in {
        "request_success_total": len(usages),
        "generation_tokens_total": 24 * len(usages),
        "prompt_tokens_total": sum(usage["prompt_tokens"] for usage in usages),
        "iteration_tokens_total_sum": 24 * len(usages),
    }.items():
        assert total(scrapes[-1], name) - total(scrapes[0], name) == grown, name


def test_what_a_hung_replica_was_asked_is_answered(url: str, served: str, text: str) -> None:
    """Serve ends it after three checks of its health, and others get what it had not answered."""
    hung = next(iter(alive("ServeReplica:two")))
    with ThreadPoolExecutor(8) as pool:
        streams = [pool.submit(streamed, url, served) for _ in range(4)]
        time.sleep(0.5)
        os.kill(hung, signal.SIGSTOP)
        whole = [pool.submit(ask, url, served, **LONG) for _ in range(4)]
        wait_until(lambda: not os.path.exists(f"/proc/{hung}"), 60)
        answers = [future.result() for future in whole]
        ends = [future.result() for future in streams]
    wait_until(lambda: states(served) == {"RUNNING": 2}, 120)
    assert [answer.status_code for answer in answers] == [200] * 4
    for answer in answers:
        assert answer.json()["choices"][0]["message"]["content"] == text
    assert all(said == text if end == "done" else text.startswith(said) for said, end in ends)


def test_a_rolling_update_drops_nothing(url: str, served: str, text: str) -> None:
    before = set(alive("ServeReplica:two"))
    with clients(4, lambda: streamed(url, served)) as found:
        time.sleep(1.0)
        engine = ENGINE | {"steps_per_round": 2}
        start(application("two", engine_kwargs=engine, deployment_config=DEPLOYMENT))
        wait_until(lambda: states(served) == {"RUNNING": 2}, 120)
        wait_until(lambda: not before & alive("ServeReplica:two").keys(), 60)
    assert found == [(text, "done")] * len(found)
