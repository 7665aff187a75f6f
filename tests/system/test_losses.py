"""Replicas that are lost or replaced under their requests, behind Serve's own proxy."""

import os
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from typing import Any

import httpx2
import pytest
from prometheus_client.parser import text_string_to_metric_families
from ray import serve

from benchmarks.local_ray import local_cluster
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
    seconds_until,
    serving,
    start,
    states,
)
from tests.helpers.served import pieces_of

pytestmark = pytest.mark.long

LONG: dict[str, Any] = {
    "max_tokens": 96,
    "ignore_eos": True,
    "diffusion": {"block_length": 32, "decoder": {"kind": "fixed", "steps": 96}},
}
DEPLOYMENT = {"num_replicas": 2, "health_check_period_s": 1}
ENGINE = {"dtype": "float64", "max_num_seqs": 4}


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    """Start three nodes with room for one replica each."""
    with local_cluster([{"num_cpus": 2}] * 3), serving() as url:
        yield url


@pytest.fixture(scope="module")
def served(url: str) -> Iterator[str]:
    wanted = application("two", engine_kwargs=ENGINE, deployment_config=DEPLOYMENT)
    print(f"two replicas are ready after {start(wanted):.1f} s")
    yield "two"
    remove(wanted)


@pytest.fixture(scope="module")
def text() -> str:
    with DiffusionLLM("demo", dtype="float64") as llm:
        (alone,) = llm.chat(MESSAGES, SamplingParams(**LONG), use_tqdm=False)
        return alone.outputs[0].text


def streamed(url: str, name: str) -> tuple[str, str]:
    """Return the text of a stream, and how it ended."""
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
    """Return the replicas that have answered a request."""
    return {
        dict(labels)["replica"]
        for (name, labels), value in series.items()
        if name.endswith("success_total") and value
    }


def test_counters_are_those_of_all_replicas(url: str, served: str) -> None:
    """Whichever replica a scrape gets: no counter falls, and what they grow by has happened."""
    url = f"{url}/{served}"
    wish = {"model": served, "messages": MESSAGES, "max_tokens": 24, "ignore_eos": True}
    scrapes, usages = [scraped(url)], []
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
        "request_queue_time_seconds_count": len(usages),
        "iteration_tokens_total_sum": 24 * len(usages),
    }.items():
        assert total(scrapes[-1], name) - total(scrapes[0], name) == grown, name


def test_a_replica_that_hangs_is_killed_and_what_it_was_asked_is_answered(
    url: str, served: str, text: str
) -> None:
    """Its coordinator ends it; Serve itself would wait for three checks of health and more."""
    hung = next(iter(alive("ServeReplica:two")))
    with ThreadPoolExecutor(8) as pool:
        streams = [pool.submit(streamed, url, served) for _ in range(4)]
        time.sleep(0.5)
        begin = time.monotonic()
        os.kill(hung, signal.SIGSTOP)
        whole = [pool.submit(ask, url, served, **LONG) for _ in range(4)]
        gone = seconds_until(lambda: not os.path.exists(f"/proc/{hung}"), 60)
        answers = [future.result() for future in whole]
        took = time.monotonic() - begin
        ends = [future.result() for future in streams]
    again = seconds_until(lambda: states(served) == {"RUNNING": 2}, 120)
    print(
        f"ended after {gone:.1f} s, all answered after {took:.1f} s, replaced {again:.1f} s later"
    )
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
        seconds_until(lambda: states(served) == {"RUNNING": 2}, 120)
        seconds_until(lambda: not before & alive("ServeReplica:two").keys(), 60)
    print(f"{len(found)} answers while both replicas were replaced")
    assert found == [(text, "done")] * len(found)
