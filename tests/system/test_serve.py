"""`diffray serve` as its users meet it: one process, two models, stock clients, Ctrl-C.

The tests stand in an order: the last ones take a rank and the server away.
"""

import json
import os
import random
import signal
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import httpx2
import openai
import pytest
from openai import OpenAI
from openai.types.batch_request_counts import BatchRequestCounts

from diffray import SamplingParams
from diffray.cluster.control.llm import DiffusionLLM
from diffray.components.checkpoints.demos import TOY, examples
from tests.helpers.npm_client import npm_project, npm_told
from tests.helpers.served import (
    HEADERS,
    KEY,
    MESSAGES,
    MODELS,
    PATIENCE_S,
    ROOM,
    Served,
    open_stream,
    pieces_of,
    text_of,
    wait_until,
)

pytestmark = pytest.mark.slow

PROMPT = "<role>HUMAN</role>What is 7 times 6?<|role_end|><role>ASSISTANT</role>"


@pytest.fixture(scope="module")
def llms() -> Iterator[dict[str, DiffusionLLM]]:
    demo, llada2 = (DiffusionLLM(name, dtype="float64", max_num_seqs=2) for name in MODELS)
    with demo, llada2:
        yield {"demo": demo, "demo-llada2": llada2}


@contextmanager
def openai_client(served: Served, path: str = "", key: str = KEY) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{served.url}{path}/v1", api_key=key, max_retries=0) as client:
        yield client


@pytest.mark.parametrize("model", MODELS)
def test_stock_client_answers(served: Served, llms: dict[str, DiffusionLLM], model: str) -> None:
    """Whole at the model's own path, and as a stream at the ingress."""
    wishes: dict[str, Any] = {"max_tokens": 32, "temperature": 0.8, "seed": 5, "n": 2}
    (expected,) = llms[model].chat(MESSAGES, SamplingParams(**wishes))
    (free,) = llms[model].generate(PROMPT, SamplingParams(max_tokens=24))
    with openai_client(served) as client, openai_client(served, f"/{model}") as own:
        assert [each.id for each in client.models.list()] == [*MODELS]
        assert [each.id for each in own.models.list()] == [model]
        assert client.models.retrieve(model).id == model
        asked: dict[str, Any] = {"model": model, "messages": MESSAGES} | wishes
        answer = own.chat.completions.create(**asked)
        told: Any = {"stream": True, "stream_options": {"include_usage": True}}
        chunks = list(client.chat.completions.create(**asked, **told))
        text = client.completions.create(model=model, prompt=PROMPT, max_tokens=24)
    assert answer.model == text.model == model and text.choices[0].text == free.outputs[0].text
    assert answer.usage is not None and chunks[-1].usage == answer.usage
    used = expected.prompt_tokens, expected.completion_tokens
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == used
    assert len({chunk.id for chunk in chunks}) == 1
    for choice, ours in zip(expected.outputs, answer.choices, strict=True):
        parts = [c for chunk in chunks for c in chunk.choices if c.index == ours.index]
        streamed = "".join(part.delta.content or "" for part in parts)
        assert streamed == ours.message.content == choice.text
        assert parts[-1].finish_reason == ours.finish_reason == choice.finish_reason


@pytest.mark.long
def test_the_npm_client_asks(served: Served, llms: dict[str, DiffusionLLM], tmp_path: Path) -> None:
    told = npm_told(npm_project(tmp_path), f"{served.url}/demo", MESSAGES, KEY)
    (expected,) = llms["demo"].chat(MESSAGES, SamplingParams(max_tokens=40), use_tqdm=False)
    assert told["text"] == told["whole"] == expected.outputs[0].text
    assert told["role"] == "assistant" and told["reason"] == expected.outputs[0].finish_reason
    assert told["usage"] == told["wholeUsage"]
    assert told["usage"]["completion_tokens"] == expected.completion_tokens
    assert told["models"] == ["demo"]
    assert told["refused"] == ["NotFoundError", 404, "model_not_found"]


@pytest.mark.parametrize("path", ["/", *(f"/{model}" for model in MODELS)])
def test_the_ingress_and_each_model_have_a_page(served: Served, path: str) -> None:
    answer = httpx2.get(f"{served.url}{path}", follow_redirects=True)
    at = str(answer.url)
    assert at == f"{served.url}{path.removesuffix('/')}/" and "page/app.js" in answer.text
    script = httpx2.get(f"{at}page/app.js", headers={"X-Request-Id": "mine"})
    assert script.headers.get_list("x-request-id") == ["mine"]  # Serve keeps it
    assert script.status_code == 200 and "'self'" in script.headers["content-security-policy"]
    assert "url: 'openapi.json'" in httpx2.get(f"{at}docs").text
    operation = httpx2.get(f"{at}openapi.json").json()["paths"]["/v1/completions"]["post"]
    example = operation["requestBody"]["content"]["application/json"]["example"]
    assert example.get("model") == ("demo" if path == "/" else None)


def test_it_says_where_each_model_is_that_it_is_a_toy_and_what_to_ask(served: Served) -> None:
    assert f"All models (demo, demo-llada2) are ready at {served.url}/v1 ; try: " in served.said
    assert served.said.count("Loading ") == 1 and served.said.count(" is ready at ") == len(MODELS)
    assert f"Chat with each of them and watch it at {served.url}/\n" in served.said
    for model in MODELS:
        prompts = list(examples(model))
        assert f"{model} is ready at {served.url}/{model}/v1\n" in served.said
        assert f"{model} {TOY}.\n" in served.said and f"\n  {prompts[0]}\n" in served.said
        for at in (f"{served.url}/{model}", served.url):
            data = httpx2.get(f"{at}/v1/models", headers=HEADERS).json()["data"]
            (listed,) = (each for each in data if each["id"] == model)
            assert (listed["description"], listed["examples"]) == (f"{model} {TOY}.", prompts)


@pytest.mark.parametrize("path", ["", "/demo"])
def test_requests_and_answers_may_have_many_megabytes(
    served: Served, llms: dict[str, DiffusionLLM], path: str
) -> None:
    tokenizer = llms["demo"].get_tokenizer()
    longest = max(range(len(tokenizer)), key=lambda token: len(tokenizer.decode([token])))
    body = {"model": "demo", "tokens": [longest] * 2**20}
    asked = httpx2.post(
        f"{served.url}{path}/detokenize", json=body, headers=HEADERS, timeout=PATIENCE_S
    )
    assert asked.json()["prompt"] == tokenizer.decode([longest]) * 2**20
    assert len(asked.request.content) > 2**22 and len(asked.content) > 2**23


@pytest.mark.parametrize("path", ["", "/demo"])
def test_an_answer_has_one_request_id(served: Served, path: str) -> None:
    for given in (dict[str, str](), {"X-Request-Id": "mine-7"}):
        answer = httpx2.get(f"{served.url}{path}/v1/models", headers=HEADERS | given)
        (request_id,) = answer.headers.get_list("x-request-id")
        assert request_id == given.get("X-Request-Id", request_id)


POLICIES: dict[str, list[dict[str, Any]]] = {
    "demo": [
        {},
        {"block_length": 8, "decoder": {"kind": "fixed", "steps": 12}},
        {"block_length": 16, "cache": {"kind": "none"}},
        {"decoder": {"kind": "credit"}, "cache": {"kind": "prefix"}},
        {"block_length": 8, "decoder": {"kind": "hierarchy"}},
    ],
    "demo-llada2": [
        {},
        {"block_length": 8, "decoder": {"kind": "fixed", "steps": 12}},
        {"decoder": {"kind": "edit"}},
    ],
}


def mixed_requests(count: int) -> list[dict[str, Any]]:
    draw = random.Random(3)
    bodies: list[dict[str, Any]] = []
    for number in range(count):
        model = MODELS[number % 8 == 7]  # with two choices each the second one is full
        content = f"Add {number} and 9." + " Now" * draw.randint(0, 9)
        sampled = {"temperature": draw.choice([0.7, 1.3]), "top_p": draw.choice([1.0, 0.9])}
        body = {
            "model": model,
            "messages": [{"role": "user", "content": content}],
            "max_tokens": draw.choice([5, 16, 24, 40]),
            "seed": draw.randrange(2**40),
            "n": draw.choice([1, 1, 1, 2]),
            "stop": draw.choice([[], [], ["1", "is"]]),
            "diffusion": draw.choice(POLICIES[model]),
        }
        bodies.append(body | draw.choice([{"temperature": 0.0}, sampled]))
    return bodies


def test_40_answers_are_solo_answers(served: Served, llms: dict[str, DiffusionLLM]) -> None:
    """Some ask the ingress, others a model's own path; some want a stream."""
    bodies = mixed_requests(40)

    def ask(number: int) -> list[str]:
        body = bodies[number]
        path = f"/{body['model']}" if number % 3 else ""
        if number % 2 and body["n"] == 1:
            *pieces, end = pieces_of(f"{served.url}{path}/v1/chat/completions", body, HEADERS)
            assert end == "done"
            return ["".join(pieces)]
        answer = served.post(path=path, **body)
        assert answer.status_code == 200, answer.text
        return [choice["message"]["content"] for choice in answer.json()["choices"]]

    with ThreadPoolExecutor(len(bodies)) as pool:
        answers = list(pool.map(ask, range(len(bodies))))
    for body, texts in zip(bodies, answers, strict=True):
        params = SamplingParams(**{k: v for k, v in body.items() if k not in ("model", "messages")})
        (alone,) = llms[body["model"]].chat(body["messages"], params, use_tqdm=False)
        assert texts == [choice.text for choice in alone.outputs], body


def test_a_batch_outlives_the_process_that_answers_it(served: Served) -> None:
    """Serve starts another one, which asks for what is not answered yet."""
    bodies = [
        {"model": MODELS[n % 2], "messages": MESSAGES, "max_tokens": 8, "seed": n, "temperature": 1}
        for n in range(120)
    ]
    lines = (
        {"custom_id": str(n), "method": "POST", "url": "/v1/chat/completions", "body": body}
        for n, body in enumerate(bodies)
    )
    content = "\n".join(map(json.dumps, lines)).encode()
    with openai_client(served) as client:
        file = client.files.create(file=("in.jsonl", content), purpose="batch")
        batch = client.batches.create(
            input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h"
        )

        def counts() -> BatchRequestCounts:
            found = client.batches.retrieve(batch.id).request_counts
            assert found is not None
            return found

        wait_until(lambda: counts().completed > 0)
        assert counts().completed < len(bodies)
        os.kill(served.pid(":Batches"), signal.SIGKILL)
        wait_until(lambda: client.batches.retrieve(batch.id).status == "completed")
        batch = client.batches.retrieve(batch.id)
        assert (counts().completed, counts().failed) == (len(bodies), 0)
        assert batch.output_file_id is not None and batch.error_file_id is None
        answers = client.files.content(batch.output_file_id).text.splitlines()
        found = {each["custom_id"]: each["response"]["body"] for each in map(json.loads, answers)}
        assert len(answers) == len(found) == len(bodies)
        for n in (0, 1, 118, 119):
            text = client.chat.completions.create(**bodies[n]).choices[0].message.content
            assert found[str(n)]["choices"][0]["message"]["content"] == text


def test_a_full_queue_refuses_and_clients_that_hang_up_leave_nothing(served: Served) -> None:
    """And the model still says that it is healthy; the other one has room."""
    aborted, answered = (
        partial(served.total, f"request_{how}_total", model_name=MODELS[1])
        for how in ("aborted", "success")
    )
    before = aborted(), answered()
    with ExitStack() as streams:
        for number in range(ROOM):
            path = "" if number % 2 else f"/{MODELS[1]}"
            body = {"model": MODELS[1]} | served.long[MODELS[1]]
            streams.enter_context(open_stream(served.port, body, path, pause=0.02))
        served.wait_for_load(running=4, waiting=ROOM - 4)
        with openai_client(served) as client, pytest.raises(openai.RateLimitError) as refused:
            client.chat.completions.create(model=MODELS[1], messages=MESSAGES)
        assert text_of(served.post(MODELS[0], max_tokens=4))
        with httpx2.Client(base_url=f"{served.url}/{MODELS[1]}") as watching:
            answers = [watching.get("/health") for _ in range(50)]
        assert {answer.status_code for answer in answers} == {200}
        assert served.load()["running"] == 4, "the streams ended before the watch did"
    assert int(refused.value.response.headers["retry-after"]) >= 1
    assert refused.value.code == "rate_limit_exceeded"
    served.wait_for_load(running=0, waiting=0, free_pages=served.load()["num_pages"])
    # On a busy machine some were answered before.
    wait_until(lambda: aborted() + answered() >= sum(before) + ROOM)
    assert aborted() >= before[0] + ROOM // 2


@pytest.mark.long
@pytest.mark.core
def test_a_killed_rank_costs_a_pause_and_no_letter(served: Served) -> None:
    texts = served.long_texts
    served.wait_for_load(running=0)
    restarts = partial(served.total, "num_restarts_total", model_name=MODELS[1])
    before, said = restarts(), served.said
    pieces = served.chunks(MODELS[1])
    text = next(pieces)
    os.kill(served.busiest("ray::Worker"), signal.SIGKILL)
    last, gap = time.monotonic(), 0.0
    for piece in pieces:
        text += piece
        gap, last = max(gap, time.monotonic() - last), time.monotonic()
    assert gap > 0.3, "the answer was complete before the rank was killed"
    assert text == texts[MODELS[1]] + "done"
    words = "; 1 request continues on a new worker group"
    served.wait_for(words, said.count(words) + 1)
    assert restarts() == before + 1


def test_ctrl_c_lets_answers_finish_and_leaves_no_process(served: Served) -> None:
    """One answer by the ingress, one without it."""
    texts = served.long_texts
    served.wait_for_load(running=0)
    started = served.processes()
    for name in ("raylet", "ray::DashboardAgent", "ray::Coordinator", "ray::Worker"):
        assert name in str(started)
    with ThreadPoolExecutor(2) as clients:
        ways = [(MODELS[0], ""), (MODELS[1], f"/{MODELS[1]}")]
        answers = [clients.submit(served.streamed, *each) for each in ways]
        while served.load()["running"] < 2:  # one may end before the other runs: ask it again
            for at, way in enumerate(ways):
                if answers[at].done():
                    answers[at] = clients.submit(served.streamed, *way)
        served.interrupt()
        begin = time.monotonic()
        assert [each.result() for each in answers] == [(texts[m], "done") for m in MODELS]
        finished = time.monotonic()
    assert finished - begin > 0.2, "the answers were complete before Ctrl-C"
    assert served.process.wait(timeout=120) == 0
    assert "Traceback" not in served.said
    assert not [pid for pid in started if Path(f"/proc/{pid}").exists()]
    assert served.processes() == {}
    socket.create_server(("127.0.0.1", served.port)).close()
