"""Several models behind one ingress: one endpoint, which passes each request to the model it names.

The tests stand in an order: the last ones take processes away.
"""

import os
import re
import shutil
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from pathlib import Path
from typing import Any

import httpx2
import pytest
import torch
from openai import OpenAI
from prometheus_client.parser import text_string_to_metric_families
from safetensors.torch import load_file, save_file

from diffray.components.checkpoints.demos import demo_path
from tests.helpers.adapters import adapter_of
from tests.helpers.nodes import clients
from tests.helpers.served import (
    HEADERS,
    KEY,
    MESSAGES,
    MODELS,
    OPERATES,
    PATIENCE_S,
    Served,
    one_token_a_step,
    text_of,
    wait_until,
)

pytestmark = pytest.mark.long


TOO_MANY = {"model": "demo", "max_tokens": 5000, "strict_max_tokens": True}


def replicas_of(served: Served, model: str) -> list[int]:
    name = f"ray::ServeReplica:{model}:Replica"
    return [pid for pid, line in served.processes().items() if line.split()[0] == name]


def test_tokens_are_those_of_the_named_model(served: Served) -> None:
    def ask(path: str, **body: Any) -> Any:
        answer = httpx2.post(f"{served.url}{path}", json=body, headers=HEADERS)
        assert answer.status_code == 200, answer.text
        return answer.json()

    for model in MODELS:
        given = {"model": model, "prompt": "What is 12 plus 30?"}
        found = ask("/tokenize", **given)
        assert found == ask(f"/{model}/tokenize", **given)
        back = ask("/detokenize", model=model, tokens=found["tokens"])
        assert back["prompt"] == given["prompt"]
        url = f"{served.url}/tokenizer_info?model={model}"
        assert httpx2.get(url, headers=HEADERS).status_code == 200
    missing = httpx2.get(f"{served.url}/tokenizer_info", headers=HEADERS)
    assert missing.status_code == 400 and "`demo-llada2`" in missing.text


@pytest.mark.parametrize(
    ("body", "status", "code", "words"),
    [
        ({}, 400, "missing_required_parameter", "one of them: `demo`, `demo-llada2`"),
        ({"model": None}, 400, "missing_required_parameter", "`demo`, `demo-llada2`"),
        ({"model": 7}, 400, "invalid_value", "`demo`, `demo-llada2`"),
        ({"model": "gpt"}, 404, "model_not_found", "`gpt` does not exist; these do: `demo`, "),
        (TOO_MANY, 400, "context_length_exceeded", "5000"),
        ({"model": "demo", "max_token": 5}, 400, None, "max_token"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_a_refusal_is_that_of_the_model_or_names_the_models(
    served: Served, body: dict[str, Any], status: int, code: str, words: str, stream: bool
) -> None:
    before = served.total("request_refused_total", status=str(status))
    given = {"messages": MESSAGES, "stream": stream} | body
    url = f"{served.url}/v1/chat/completions"
    answer = httpx2.post(url, json=given, headers=HEADERS | {"X-Request-Id": "mine-7"})
    assert answer.status_code == status
    assert answer.headers.get_list("x-request-id") == ["mine-7"]
    error = answer.json()["error"]
    assert words in error["message"] and error["code"] in (code, error["code"] if not code else "")
    assert served.total("request_refused_total", status=str(status)) == before + 1
    if body.get("model") == "demo":
        own = httpx2.post(f"{served.url}/demo/v1/chat/completions", json=given, headers=HEADERS)
        assert own.json() == answer.json()


def test_metrics_and_load_are_those_of_all_replicas_of_all_models(served: Served) -> None:
    text = httpx2.get(f"{served.url}/metrics").text
    families = list(text_string_to_metric_families(text))
    assert len({family.name for family in families}) == len(families)
    seen = {
        (sample.labels["model_name"], sample.labels["replica"])
        for sample in served.samples()
        if sample.name == "diffray:generation_tokens_total"
    }
    assert sorted(model for model, _ in seen) == ["demo", "demo", "demo-llada2"]
    wanted = {model: served.total("min_replicas", model_name=model) for model in MODELS}
    assert wanted == {"demo": 2 + 2, "demo-llada2": 1}
    before = {model: served.total("request_success_total", model_name=model) for model in MODELS}
    assert text_of(served.post("demo-llada2", max_tokens=8))
    grown = {model: served.total("request_success_total", model_name=model) for model in MODELS}
    assert grown == before | {"demo-llada2": before["demo-llada2"] + 1}
    pages = [served.load(f"/{model}")["num_pages"] for model in MODELS]
    wait_until(lambda: served.load()["num_pages"] == 2 * pages[0] + pages[1])


def operated(served: Served, path: str, **body: Any) -> httpx2.Response:
    url = f"{served.url}{path}"
    assert httpx2.post(url, json=body, headers=HEADERS).status_code == 403
    return httpx2.post(url, json=body, headers=OPERATES, timeout=PATIENCE_S)


def update(served: Served, version: str, path: str = "demo", **more: str) -> None:
    body = {"model": "demo", "model_path": path, "weight_version": version} | more
    made = operated(served, "/update_weights_from_disk", **body)
    assert made.status_code == 200 and made.json()["weight_version"] == version, made.text


def version_of(answer: httpx2.Response) -> str:
    (choice,) = answer.json()["choices"]
    return str(choice["trajectory"]["weight_version"])


def of_replicas(served: Served, name: str, model: str = "demo") -> dict[str, int]:
    return {
        sample.labels["replica"]: int(sample.value)
        for sample in served.samples()
        if sample.name == f"diffray:{name}" and sample.labels["model_name"] == model
    }


def test_no_answer_is_by_two_versions_of_the_weights(served: Served, tmp_path: Path) -> None:
    """Clients ask both replicas all along, and every answer is whole by the version it names."""
    old = demo_path("demo")
    assert old is not None
    folder = Path(shutil.copytree(old, tmp_path / "other"))
    torch.manual_seed(0)
    weights = load_file(old / "model.safetensors")
    save_file(
        {
            name: (each * (1 + torch.randn(each.shape) / 4)).to(each.dtype)
            for name, each in weights.items()
        },
        folder / "model.safetensors",
    )
    paths = {"old": "demo", "new": str(folder)}
    options = one_token_a_step(48) | {"return_trajectory": True}

    def ask(number: int) -> tuple[str, int, str]:
        messages = [{"role": "user", "content": f"What is {number} plus {number + 20}?"}]
        answer = served.post("demo", messages=messages, **options)
        text = text_of(answer)
        return version_of(answer), number, text

    expected = set()
    for version, path in paths.items():
        update(served, version, path)
        listed = httpx2.get(f"{served.url}/v1/models", headers=HEADERS).json()["data"]
        assert [each["weight_version"] for each in listed] == [version, "0"]
        expected |= {ask(number) for number in range(4)}
    assert len({text for _, _, text in expected}) == 8
    turns = count()
    with clients(4, lambda: ask(next(turns) % 4)) as found:
        for turn in range(8):
            version = ("old", "new")[turn % 2]
            in_flight = ("finish", "restart")[turn // 2 % 2]
            update(served, version, paths[version], in_flight=in_flight)
    assert set(found) <= expected
    assert {version for version, _, _ in found} == {"old", "new"}
    assert len(found) > 16


def test_an_operator_lets_all_replicas_of_a_model_sleep(served: Served) -> None:
    def sleeps(model: str) -> bool:
        url = f"{served.url}/is_sleeping?model={model}"
        return bool(httpx2.get(url, headers=OPERATES, timeout=PATIENCE_S).json()["is_sleeping"])

    def levels(model: str) -> list[int]:
        return [*of_replicas(served, "engine_sleep_level", model).values()]

    before = text_of(served.post("demo", max_tokens=8))
    assert operated(served, "/sleep?level=2&model=demo").status_code == 200
    assert [sleeps(model) for model in MODELS] == [True, False]
    wait_until(lambda: (levels("demo"), levels("demo-llada2")) == ([2, 2], [0]))
    wait_until(lambda: set(served.health().values()) == {"healthy"})
    assert text_of(served.post("demo-llada2", max_tokens=8))
    with ThreadPoolExecutor(2) as pool:
        waiting = [pool.submit(served.post, "demo", max_tokens=8) for _ in range(2)]
        served.wait_for_load(waiting=2)
        assert operated(served, "/wake_up?model=demo").status_code == 200
        assert [text_of(each.result()) for each in waiting] == [before] * 2
    wait_until(lambda: levels("demo") == [0, 0])


def test_an_adapter_is_a_model_behind_the_ingress(served: Served, tmp_path: Path) -> None:
    """Of both replicas, from its loading to its unloading."""
    path = str(adapter_of("demo", tmp_path / "mine", rank=8, lora_alpha=64))
    body = {"model": "demo", "lora_name": "mine", "lora_path": path}
    load, unload = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"
    assert served.post("mine").status_code == 404
    assert operated(served, load, **body | {"lora_name": "demo-llada2"}).status_code == 400
    made = operated(served, load, **body)
    assert made.status_code == 200, made.text
    listed = httpx2.get(f"{served.url}/v1/models", headers=HEADERS).json()["data"]
    parents = {each["id"]: each["parent"] for each in listed}
    assert parents == {"demo": None, "mine": "demo", "demo-llada2": None}
    texts = {text_of(served.post("mine", max_tokens=16)) for _ in range(6)}
    assert len(texts) == 1 and texts != {text_of(served.post("demo", max_tokens=16))}
    with OpenAI(base_url=f"{served.url}/v1", api_key=KEY, max_retries=0) as client:
        asked: Any = {"model": "mine", "messages": MESSAGES, "max_tokens": 16}
        stream = client.chat.completions.create(**asked, stream=True)
        assert "".join(chunk.choices[0].delta.content or "" for chunk in stream) in texts
    shown = httpx2.get(f"{served.url}/v1/models/mine", headers=HEADERS).json()
    assert (shown["id"], shown["parent"]) == ("mine", "demo")
    assert operated(served, unload, model="mine", lora_name="mine").status_code == 200
    assert [served.post("mine").status_code for _ in range(4)] == [404] * 4


def test_a_replica_that_starts_later_has_them_too(served: Served) -> None:
    update(served, "later")
    before = of_replicas(served, "num_weight_updates_total")
    os.kill(replicas_of(served, "demo")[0], signal.SIGKILL)
    end = time.monotonic() + PATIENCE_S
    while (
        len(found := of_replicas(served, "num_weight_updates_total")) < 2
        or found.keys() == before.keys()
    ):
        assert time.monotonic() < end, found
        time.sleep(0.2)
    assert min(found.values()) == 1
    for _ in range(4):
        answer = served.post("demo", return_trajectory=True, max_tokens=8)
        assert version_of(answer) == "later"


@pytest.mark.core
def test_a_lost_replica_s_answers_come_from_another(served: Served) -> None:
    """And the other model's clients notice nothing."""
    texts = served.long_texts
    killed = False
    for _ in range(5):  # until no answer ends before all run: a client may wait for its processor
        served.wait_for_load(running=0)
        with ThreadPoolExecutor(9) as pool:
            ways = ("", "/demo") * 2  # the ingress asks again, or the proxy
            whole = [pool.submit(served.post, "demo", way, **served.long["demo"]) for way in ways]
            streams = [pool.submit(served.streamed, "demo") for _ in range(4)]
            other = pool.submit(served.streamed, "demo-llada2")
            while served.load()["running"] < 9 and not any(each.done() for each in whole):
                pass
            if not any(each.done() for each in whole):
                os.kill(replicas_of(served, "demo")[0], signal.SIGKILL)
                killed = True
            answers = [future.result() for future in whole]
            ends = [future.result() for future in streams]
            text, end_of_stream = other.result()
        assert end_of_stream == "done", served.said
        assert text == texts["demo-llada2"]
        assert [text_of(answer) for answer in answers] == [texts["demo"]] * 4
        for text, end_of_stream in ends:
            assert texts["demo"].startswith(text)
            assert end_of_stream == "done" or "send the request again" in end_of_stream
        if killed:
            return
    raise AssertionError("some answers always ended before others began")


def test_a_model_without_a_replica_leaves_the_other_alone(served: Served) -> None:
    (pid,) = replicas_of(served, "demo-llada2")
    pieces = served.chunks("demo-llada2")
    next(pieces)
    os.kill(pid, signal.SIGKILL)
    assert "send the request again" in [*pieces][-1]
    seen = served.health()
    assert seen == {"demo": "healthy", "demo-llada2": "no replica answers"}
    begin = time.monotonic()
    while served.health() == seen:
        assert text_of(served.post("demo", max_tokens=8))
        assert time.monotonic() < begin + PATIENCE_S
    answer = served.post("demo-llada2", max_tokens=8)
    end = time.monotonic() + PATIENCE_S
    while answer.status_code == 503:  # after a wait, on a machine where the start takes longer
        assert int(answer.headers["retry-after"]) >= 1 and time.monotonic() < end
        answer = served.post("demo-llada2", max_tokens=8)
    assert text_of(answer)


def test_a_lost_ingress_comes_back_and_no_model_is_touched(served: Served) -> None:
    before = {model: replicas_of(served, model) for model in MODELS}
    ingress = re.compile(r"ray::ServeReplica:ingress-demo-demo-llada2:Ingress")
    (pid,) = (pid for pid, line in served.processes().items() if ingress.match(line))
    os.kill(pid, signal.SIGKILL)
    end = time.monotonic() + PATIENCE_S
    while True:
        assert text_of(served.post("demo", "/demo", max_tokens=8)), "its own path needs no ingress"
        try:
            answer = served.post("demo", max_tokens=8)
        except httpx2.TransportError:
            continue
        if answer.status_code == 200:
            break
        assert answer.status_code in (502, 503) and time.monotonic() < end, answer.text
        time.sleep(0.2)
    for model, replicas in before.items():  # one that was added for load may end meanwhile
        left = replicas_of(served, model)
        assert left and set(left) <= set(replicas)
