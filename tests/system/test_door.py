"""Several models behind one door: one endpoint, which passes each request to the model it names.

The tests share one server and stand in an order: the last ones take processes away.
"""

import asyncio
import json
import os
import re
import shutil
import signal
import socket
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from functools import partial
from html import unescape
from itertools import count
from pathlib import Path
from threading import Event
from typing import Any

import httpx2
import openai
import pytest
import torch
from openai import AsyncOpenAI, OpenAI
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample
from safetensors.torch import load_file, save_file

from benchmarks.serve_process import ServeProcess, serve_process
from diffray.components.checkpoints.demos import demo_path
from tests.helpers.adapters import adapter_of

pytestmark = pytest.mark.long

KEY, OPERATOR = "a-key", "an-operator-s-key"
MODELS = ("demo", "demo-llada2")
ROOM = 8  # of the second model, in slots and in its queue
ENGINE = "dtype: float64, device: cpu, cpu_threads: 1"
CONFIG = f"""
llm_configs:
  - model_loading_config: {{model_id: demo}}
    engine_kwargs: {{{ENGINE}, max_num_seqs: 8}}
    deployment_config: {{num_replicas: 2, health_check_period_s: 1}}
    api: {{api_keys: [{KEY}], operator_keys: [{OPERATOR}]}}
  - model_loading_config: {{model_id: demo-llada2}}
    engine_kwargs: {{{ENGINE}, max_num_seqs: 4, max_queued_requests: {ROOM - 4}}}
    deployment_config: {{health_check_period_s: 1}}
    api: {{api_keys: [{KEY}], operator_keys: [{OPERATOR}]}}
door: {{num_replicas: 1}}
"""
HEADERS, OPERATES = ({"Authorization": f"Bearer {key}"} for key in (KEY, OPERATOR))
MESSAGES: Any = [{"role": "user", "content": "What is 12 plus 30?"}]
PATIENCE_S = 240.0  # seconds for what takes few, on a machine that does other things too
# Takes seconds: one token a step.
LONG: dict[str, Any] = {
    "max_tokens": 384,
    "min_tokens": 384,
    "diffusion": {"block_length": 32, "decoder": {"kind": "fixed", "steps": 384}},
}


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServeProcess]:
    config = tmp_path_factory.mktemp("door") / "models.yaml"
    config.write_text(CONFIG)
    with serve_process("--config", str(config)) as running:
        running.wait_for("are ready at ", 1)
        wait_until(lambda: set(health(running).values()) == {"healthy"})
        yield running


@pytest.fixture(scope="module")
def long_texts(served: ServeProcess) -> dict[str, str]:
    """What each model writes at its own path, without the door."""
    return {model: text_of(post(served, model, f"/{model}", **LONG)) for model in MODELS}


def wait_until(holds: Callable[[], bool]) -> None:
    end = time.monotonic() + PATIENCE_S
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.05)


@contextmanager
def client(served: ServeProcess) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{served.url}/v1", api_key=KEY, max_retries=0) as made:
        yield made


def post(served: ServeProcess, model: str, path: str = "", **options: Any) -> httpx2.Response:
    body = {"model": model, "messages": MESSAGES} | options
    url = f"{served.url}{path}/v1/chat/completions"
    return httpx2.post(url, json=body, headers=HEADERS, timeout=PATIENCE_S)


def text_of(answer: httpx2.Response) -> str:
    assert answer.status_code == 200, answer.text
    text: str = answer.json()["choices"][0]["message"]["content"]
    return text


def health(served: ServeProcess) -> dict[str, str]:
    found: dict[str, str] = httpx2.get(f"{served.url}/health").json()["models"]
    return found


def load(served: ServeProcess, path: str = "") -> dict[str, int]:
    found: dict[str, int] = httpx2.get(f"{served.url}{path}/load", headers=HEADERS).json()
    return found


def wait_for_load(served: ServeProcess, **wanted: int) -> None:
    """Wait until the load of all models together is like this."""
    end = time.monotonic() + PATIENCE_S
    while not wanted.items() <= (found := load(served)).items():
        assert time.monotonic() < end, found
        time.sleep(0.05)


def samples(served: ServeProcess) -> list[Sample]:
    """Return all series once every replica's are there: the door leaves out who answers late."""
    end = time.monotonic() + PATIENCE_S
    while True:
        text = httpx2.get(f"{served.url}/metrics").text
        found = [each for family in text_string_to_metric_families(text) for each in family.samples]
        names = [each.labels["replica"] for each in found if each.name.endswith("_updates_total")]
        if len(names) == 3:
            return found
        assert time.monotonic() < end, names
        time.sleep(0.2)


def total(served: ServeProcess, name: str, **labels: str) -> float:
    """Return the sum of the series with these labels, as the door shows them."""
    return sum(
        sample.value
        for sample in samples(served)
        if sample.name == f"diffray:{name}" and labels.items() <= sample.labels.items()
    )


def chunks(served: ServeProcess, model: str) -> Iterator[str]:
    """Yield the pieces of a long stream, and then how it ended."""
    body = {"model": model, "messages": MESSAGES, "stream": True} | LONG
    url = f"{served.url}/v1/chat/completions"
    with httpx2.stream("POST", url, json=body, headers=HEADERS, timeout=PATIENCE_S) as answer:
        for line in answer.iter_lines():
            if line == "data: [DONE]":
                yield "done"
                return
            if line.startswith("data: "):
                chunk = json.loads(line[6:])
                if "error" in chunk:
                    yield chunk["error"]["message"]
                    return
                if text := chunk["choices"][0]["delta"].get("content"):
                    yield text
    yield "broken off"


def streamed(served: ServeProcess, model: str) -> tuple[str, str]:
    """Return the text of a long stream, and how it ended."""
    *pieces, end = chunks(served, model)
    return "".join(pieces), end


def replicas_of(served: ServeProcess, model: str) -> list[int]:
    name = f"ray::ServeReplica:{model}:Replica"
    return [pid for pid, line in served.processes().items() if line.split()[0] == name]


def test_a_stock_client_lists_all_and_talks_with_each(served: ServeProcess) -> None:
    wishes: dict[str, Any] = {"max_tokens": 32, "temperature": 0.8, "seed": 5, "n": 2}
    with client(served) as made:
        assert [each.id for each in made.models.list()] == [*MODELS]
        for model in MODELS:
            assert made.models.retrieve(model).id == model
            asked: dict[str, Any] = {"model": model, "messages": MESSAGES} | wishes
            answer = made.chat.completions.create(**asked)
            own = post(served, model, f"/{model}", **wishes).json()
            assert answer.model == model
            for ours, choice in zip(answer.choices, own["choices"], strict=True):
                assert ours.message.content == choice["message"]["content"]
            told: Any = {"stream": True, "stream_options": {"include_usage": True}}
            chunks = list(made.chat.completions.create(**asked, **told))
            for ours in answer.choices:
                parts = [c for chunk in chunks for c in chunk.choices if c.index == ours.index]
                assert "".join(p.delta.content or "" for p in parts) == ours.message.content
            assert chunks[-1].usage == answer.usage
            written = made.completions.create(model=model, prompt="12 plus 30", max_tokens=8)
            assert (written.model, written.object) == (model, "text_completion")


def test_it_says_where_it_is_and_has_a_page(served: ServeProcess) -> None:
    assert f"All models (demo, demo-llada2) are ready at {served.url}/v1 ; try: " in served.said
    assert served.said.count("Loading ") == 1 and served.said.count(" is ready at ") == len(MODELS)
    assert f"Chat with each of them and watch it at {served.url}/\n" in served.said
    assert "page/app.js" in httpx2.get(f"{served.url}/").text
    assert '"model": "demo"' in unescape(httpx2.get(f"{served.url}/docs").text)
    listed = httpx2.get(f"{served.url}/v1/models", headers=HEADERS).json()["data"]
    assert all(each["examples"] and each["max_model_len"] for each in listed)


def test_tokens_are_those_of_the_named_model(served: ServeProcess) -> None:
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


@pytest.mark.parametrize(
    ("body", "status", "code", "words"),
    [
        ({}, 400, "missing_required_parameter", "one of them: `demo`, `demo-llada2`"),
        ({"model": None}, 400, "missing_required_parameter", "`demo`, `demo-llada2`"),
        ({"model": 7}, 400, "invalid_value", "`demo`, `demo-llada2`"),
        ({"model": "gpt"}, 404, "model_not_found", "`gpt` does not exist; these do: `demo`, "),
        ({"model": "demo", "max_tokens": 5000}, 400, "context_length_exceeded", "5000"),
        ({"model": "demo", "max_token": 5}, 400, None, "max_token"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_a_refusal_is_that_of_the_model_or_names_the_models(
    served: ServeProcess, body: dict[str, Any], status: int, code: str, words: str, stream: bool
) -> None:
    before = total(served, "request_refused_total", status=str(status))
    given = {"messages": MESSAGES, "stream": stream} | body
    url = f"{served.url}/v1/chat/completions"
    answer = httpx2.post(url, json=given, headers=HEADERS | {"X-Request-Id": "mine-7"})
    assert answer.status_code == status
    assert answer.headers.get_list("x-request-id") == ["mine-7"]
    error = answer.json()["error"]
    assert words in error["message"] and error["code"] in (code, error["code"] if not code else "")
    assert total(served, "request_refused_total", status=str(status)) == before + 1
    if body.get("model") == "demo":
        own = httpx2.post(f"{served.url}/demo/v1/chat/completions", json=given, headers=HEADERS)
        assert own.json() == answer.json()


def test_the_door_has_the_keys_of_its_models(served: ServeProcess) -> None:
    with (
        OpenAI(base_url=f"{served.url}/v1", api_key="wrong", max_retries=0) as stranger,
        pytest.raises(openai.AuthenticationError),
    ):
        stranger.chat.completions.create(model="demo", messages=MESSAGES)
    missing = httpx2.get(f"{served.url}/tokenizer_info", headers=HEADERS)
    assert missing.status_code == 400 and "`demo-llada2`" in missing.text


def test_each_of_32_answers_is_its_model_s(served: ServeProcess) -> None:
    def body(number: int) -> dict[str, Any]:
        asked = [{"role": "user", "content": f"What is {number} plus 30?"}]
        limits = {"max_tokens": 24, "seed": number, "temperature": 0.7}
        return {"model": MODELS[number % 4 == 3], "messages": asked} | limits

    async def ask(made: AsyncOpenAI, number: int) -> str:
        asked: Any = body(number)
        if number % 2:
            text = ""
            async for chunk in await made.chat.completions.create(**asked, stream=True):
                text += chunk.choices[0].delta.content or ""
            return text
        answer = await made.chat.completions.create(**asked)
        return answer.choices[0].message.content or ""

    async def all_at_once() -> list[str]:
        url = f"{served.url}/v1"
        async with AsyncOpenAI(base_url=url, api_key=KEY, max_retries=0, timeout=300) as made:
            return await asyncio.gather(*(ask(made, number) for number in range(32)))

    for number, text in enumerate(asyncio.run(all_at_once())):
        given = body(number)
        assert text == text_of(post(served, path=f"/{given['model']}", **given)), given


def test_metrics_and_load_are_those_of_all_replicas_of_all_models(served: ServeProcess) -> None:
    text = httpx2.get(f"{served.url}/metrics").text
    families = list(text_string_to_metric_families(text))
    assert len({family.name for family in families}) == len(families)
    seen = {
        (sample.labels["model_name"], sample.labels["replica"])
        for sample in samples(served)
        if sample.name == "diffray:generation_tokens_total"
    }
    assert sorted(model for model, _ in seen) == ["demo", "demo", "demo-llada2"]
    before = {model: total(served, "request_success_total", model_name=model) for model in MODELS}
    assert text_of(post(served, "demo-llada2", max_tokens=8))
    grown = {model: total(served, "request_success_total", model_name=model) for model in MODELS}
    assert grown == before | {"demo-llada2": before["demo-llada2"] + 1}
    pages = [load(served, f"/{model}")["num_pages"] for model in MODELS]
    wait_until(lambda: load(served)["num_pages"] == 2 * pages[0] + pages[1])


def of_replicas(served: ServeProcess, name: str, model: str = "demo") -> dict[str, int]:
    """Return a metric of each replica of a model."""
    return {
        sample.labels["replica"]: int(sample.value)
        for sample in samples(served)
        if sample.name == f"diffray:{name}" and sample.labels["model_name"] == model
    }


def updates(served: ServeProcess) -> dict[str, int]:
    """Return how often the weights of each replica of `demo` were replaced."""
    return of_replicas(served, "num_weight_updates_total")


def test_an_operator_gives_all_replicas_new_weights(served: ServeProcess) -> None:
    """The same ones under another name, so that the texts stay as they are."""
    url = f"{served.url}/update_weights_from_disk"
    body = {"model": "demo", "model_path": "demo", "weight_version": "again"}
    assert httpx2.post(url, json=body, headers=HEADERS).status_code == 403
    wrong = body | {"model_path": "demo-llada2"}
    refused = httpx2.post(url, json=wrong, headers=OPERATES, timeout=PATIENCE_S)
    assert refused.status_code == 400 and "another model" in refused.text
    assert [*updates(served).values()] == [0, 0]
    made = httpx2.post(url, json=body, headers=OPERATES, timeout=PATIENCE_S)
    assert made.status_code == 200 and made.json()["weight_version"] == "again", made.text
    wait_until(lambda: [*updates(served).values()] == [1, 1])
    listed = httpx2.get(f"{served.url}/v1/models", headers=HEADERS).json()["data"]
    assert [each["weight_version"] for each in listed] == ["again", "0"]
    traced: dict[str, Any] = {"return_trajectory": True, "max_tokens": 8}
    for _ in range(4):
        (choice,) = post(served, "demo", **traced).json()["choices"]
        assert choice["trajectory"]["weight_version"] == "again"


def test_no_answer_under_load_is_by_two_versions_of_the_weights(
    served: ServeProcess, tmp_path: Path
) -> None:
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
    options = LONG | {"max_tokens": 64, "min_tokens": 64, "return_trajectory": True}

    def update(version: str, in_flight: str = "finish") -> None:
        path = "demo" if version == "old" else str(folder)
        body = {"model": "demo", "model_path": path, "in_flight": in_flight}
        made = httpx2.post(
            f"{served.url}/update_weights_from_disk",
            json=body | {"weight_version": version},
            headers=OPERATES,
            timeout=PATIENCE_S,
        )
        assert made.status_code == 200, made.text

    def ask(number: int) -> tuple[str, int, str]:
        messages = [{"role": "user", "content": f"What is {number} plus {number + 20}?"}]
        answer = post(served, "demo", messages=messages, **options)
        text = text_of(answer)
        return answer.json()["choices"][0]["trajectory"]["weight_version"], number, text

    expected = set()
    for version in ("old", "new"):
        update(version)
        expected |= {ask(number) for number in range(4)}
    assert len({text for _, _, text in expected}) == 8
    ended, found = Event(), []

    def ask_on(client: int) -> None:
        for turn in count():
            if ended.is_set():
                return
            found.append(ask((client + turn) % 4))

    with ThreadPoolExecutor(4) as clients:
        asking = [clients.submit(ask_on, number) for number in range(4)]
        try:
            for turn in range(8):
                update(("old", "new")[turn % 2], ("finish", "restart")[turn // 2 % 2])
        finally:
            ended.set()
        for each in asking:
            each.result()
    assert set(found) <= expected
    assert {version for version, _, _ in found} == {"old", "new"}
    assert len(found) > 16


def test_an_operator_lets_all_replicas_of_a_model_sleep(served: ServeProcess) -> None:
    def operate(method: str, path: str) -> httpx2.Response:
        url = f"{served.url}{path}"
        answer = httpx2.request(method, url, headers=OPERATES, timeout=PATIENCE_S)
        assert answer.status_code == 200, answer.text
        return answer

    def levels(model: str) -> list[int]:
        return [*of_replicas(served, "engine_sleep_level", model).values()]

    assert httpx2.post(f"{served.url}/sleep?model=demo", headers=HEADERS).status_code == 403
    before = text_of(post(served, "demo", max_tokens=8))
    operate("POST", "/sleep?level=2&model=demo")
    assert operate("GET", "/is_sleeping?model=demo").json() == {"is_sleeping": True}
    assert operate("GET", "/is_sleeping?model=demo-llada2").json() == {"is_sleeping": False}
    wait_until(lambda: (levels("demo"), levels("demo-llada2")) == ([2, 2], [0]))
    wait_until(lambda: set(health(served).values()) == {"healthy"})
    assert text_of(post(served, "demo-llada2", max_tokens=8))
    with ThreadPoolExecutor(2) as clients:
        waiting = [clients.submit(post, served, "demo", max_tokens=8) for _ in range(2)]
        wait_for_load(served, waiting=2)
        operate("POST", "/wake_up?model=demo")
        assert [text_of(each.result()) for each in waiting] == [before] * 2
    wait_until(lambda: levels("demo") == [0, 0])


def test_an_adapter_is_a_model_behind_the_door(served: ServeProcess, tmp_path: Path) -> None:
    """Of both replicas, from its loading to its unloading."""
    path = str(adapter_of("demo", tmp_path / "mine", rank=8, lora_alpha=64))
    body = {"model": "demo", "lora_name": "mine", "lora_path": path}

    def operate(name: str, **headers: str) -> httpx2.Response:
        url = f"{served.url}/v1/{name}_lora_adapter"
        asked = body if name == "load" else {"model": "mine", "lora_name": "mine"}
        return httpx2.post(url, json=asked, headers=headers or OPERATES, timeout=PATIENCE_S)

    assert operate("load", **HEADERS).status_code == 403
    assert post(served, "mine").status_code == 404
    taken = body | {"lora_name": "demo-llada2"}
    url = f"{served.url}/v1/load_lora_adapter"
    assert httpx2.post(url, json=taken, headers=OPERATES, timeout=PATIENCE_S).status_code == 400
    made = operate("load")
    assert made.status_code == 200, made.text
    listed = httpx2.get(f"{served.url}/v1/models", headers=HEADERS).json()["data"]
    parents = {each["id"]: each["parent"] for each in listed}
    assert parents == {"demo": None, "mine": "demo", "demo-llada2": None}
    texts = {text_of(post(served, "mine")) for _ in range(6)}
    assert len(texts) == 1 and texts != {text_of(post(served, "demo"))}
    with client(served) as openai:
        chunks = openai.chat.completions.create(model="mine", messages=MESSAGES, stream=True)
        assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) in texts
    shown = httpx2.get(f"{served.url}/v1/models/mine", headers=HEADERS).json()
    assert (shown["id"], shown["parent"]) == ("mine", "demo")
    assert operate("unload").status_code == 200
    assert [post(served, "mine").status_code for _ in range(4)] == [404] * 4


def test_a_replica_that_starts_later_has_them_too(served: ServeProcess) -> None:
    url = f"{served.url}/update_weights_from_disk"
    body = {"model": "demo", "model_path": "demo", "weight_version": "later"}
    made = httpx2.post(url, json=body, headers=OPERATES, timeout=PATIENCE_S)
    assert made.status_code == 200, made.text
    before = updates(served)
    os.kill(replicas_of(served, "demo")[0], signal.SIGKILL)
    end = time.monotonic() + PATIENCE_S
    while len(found := updates(served)) < 2 or found.keys() == before.keys():
        assert time.monotonic() < end, found
        time.sleep(0.2)
    assert min(found.values()) == 1
    for _ in range(4):
        asked = post(served, "demo", return_trajectory=True, max_tokens=8)
        (choice,) = asked.json()["choices"]
        assert choice["trajectory"]["weight_version"] == "later"


def test_a_full_queue_refuses_and_clients_that_hang_up_leave_nothing(served: ServeProcess) -> None:
    before = total(served, "request_aborted_total", model_name="demo-llada2")
    body = {"model": "demo-llada2", "messages": MESSAGES, "stream": True} | LONG
    text = json.dumps(body)
    head = (
        "POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1\r\n"
        f"Authorization: Bearer {KEY}\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(text)}\r\n\r\n"
    )
    with ExitStack() as streams:
        for _ in range(ROOM):
            connection = socket.create_connection(("127.0.0.1", served.port))
            streams.enter_context(connection).sendall(f"{head}{text}".encode())
        wait_for_load(served, running=4, waiting=ROOM - 4)
        refused = post(served, "demo-llada2", max_tokens=4)
        assert refused.status_code == 429
        assert int(refused.headers["retry-after"]) >= 1
        assert refused.json()["error"]["code"] == "rate_limit_exceeded"
        assert text_of(post(served, "demo", max_tokens=4)), "the other model has room"
    wait_for_load(served, running=0, waiting=0)
    aborted = partial(total, served, "request_aborted_total", model_name="demo-llada2")
    wait_until(lambda: aborted() >= before + ROOM)


def test_a_killed_rank_costs_a_pause_and_no_letter(
    served: ServeProcess, long_texts: dict[str, str]
) -> None:
    wait_for_load(served, running=0)
    pieces = chunks(served, "demo-llada2")
    first = next(pieces)
    os.kill(served.busiest("ray::Worker"), signal.SIGKILL)
    *rest, end = pieces
    assert ("".join([first, *rest]), end) == (long_texts["demo-llada2"], "done")
    served.wait_for("; 1 request continues on a new worker group", 1)


@pytest.mark.core
def test_a_lost_replica_s_answers_come_from_another(
    served: ServeProcess, long_texts: dict[str, str]
) -> None:
    """And the other model's clients notice nothing."""
    wait_for_load(served, running=0)
    with ThreadPoolExecutor(9) as clients:
        whole = [clients.submit(post, served, "demo", **LONG) for _ in range(4)]
        streams = [clients.submit(streamed, served, "demo") for _ in range(4)]
        other = clients.submit(streamed, served, "demo-llada2")
        end = time.monotonic() + PATIENCE_S
        while load(served)["running"] < 9:
            assert time.monotonic() < end and not any(each.done() for each in whole)
        os.kill(replicas_of(served, "demo")[0], signal.SIGKILL)
        answers = [future.result() for future in whole]
        ends = [future.result() for future in streams]
        assert other.result() == (long_texts["demo-llada2"], "done")
    assert [text_of(answer) for answer in answers] == [long_texts["demo"]] * 4
    for text, end_of_stream in ends:
        assert long_texts["demo"].startswith(text)
        assert end_of_stream == "done" or "send the request again" in end_of_stream


def test_a_model_without_a_replica_leaves_the_other_alone(served: ServeProcess) -> None:
    (pid,) = replicas_of(served, "demo-llada2")
    pieces = chunks(served, "demo-llada2")
    next(pieces)
    os.kill(pid, signal.SIGKILL)
    assert "send the request again" in [*pieces][-1]
    seen = health(served)
    assert seen == {"demo": "healthy", "demo-llada2": "no replica answers"}
    begin = time.monotonic()
    while health(served) == seen:
        assert text_of(post(served, "demo", max_tokens=8))
        assert time.monotonic() < begin + PATIENCE_S
    answer = post(served, "demo-llada2", max_tokens=8)
    end = time.monotonic() + PATIENCE_S
    while answer.status_code == 503:  # after a wait, on a machine where the start takes longer
        assert int(answer.headers["retry-after"]) >= 1 and time.monotonic() < end
        answer = post(served, "demo-llada2", max_tokens=8)
    assert text_of(answer)


def test_a_lost_door_comes_back_and_no_model_is_touched(served: ServeProcess) -> None:
    before = {model: replicas_of(served, model) for model in MODELS}
    door = re.compile(r"ray::ServeReplica:door-demo-demo-llada2:Door")
    (pid,) = (pid for pid, line in served.processes().items() if door.match(line))
    os.kill(pid, signal.SIGKILL)
    end = time.monotonic() + PATIENCE_S
    while True:
        assert text_of(post(served, "demo", "/demo", max_tokens=8)), "its own path needs no door"
        try:
            answer = post(served, "demo", max_tokens=8)
        except httpx2.TransportError:
            continue
        if answer.status_code == 200:
            break
        assert answer.status_code in (502, 503) and time.monotonic() < end, answer.text
        time.sleep(0.2)
    for model, replicas in before.items():  # one that was added for load may end meanwhile
        left = replicas_of(served, model)
        assert left and set(left) <= set(replicas)


def test_ctrl_c_lets_answers_finish(served: ServeProcess, long_texts: dict[str, str]) -> None:
    with ThreadPoolExecutor(2) as clients:
        answers = {model: clients.submit(streamed, served, model) for model in MODELS}
        while load(served)["running"] < 2:
            assert not [each.result() for each in answers.values() if each.done()]
        served.interrupt()
        assert {model: each.result() for model, each in answers.items()} == {
            model: (text, "done") for model, text in long_texts.items()
        }
    assert served.process.wait(PATIENCE_S) == 0
    assert "Traceback" not in served.said
    assert served.processes() == {}
