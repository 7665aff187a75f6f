"""`diffray serve` as its users meet it: one process, two models, stock clients, Ctrl-C.

The tests share one server and stand in an order: the last ones take a rank and the server away.
"""

import asyncio
import json
import os
import random
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from html import unescape
from pathlib import Path
from statistics import quantiles
from typing import Any

import httpx2
import openai
import pytest
from openai import AsyncOpenAI, OpenAI

from benchmarks.serve_process import ServeProcess, environment, serve_command, serve_process
from diffray import SamplingParams
from diffray.cluster.control.llm import DiffusionLLM
from diffray.components.checkpoints.demos import TOY, examples
from tests.helpers.npm_client import npm_project, npm_told

pytestmark = pytest.mark.slow

KEY = "a-key"
MODELS = ("demo", "demo-llada2")
ROOM = 16  # of the second model, in slots and in its queue
ENGINE = "dtype: float64, device: cpu, cpu_threads: 1, check_every: 8"
CONFIG = f"""
llm_configs:
  - model_loading_config: {{model_id: demo}}
    engine_kwargs: {{{ENGINE}, max_num_seqs: 8}}
    api: {{api_keys: [{KEY}]}}
  - model_loading_config: {{model_id: demo-llada2}}
    engine_kwargs: {{{ENGINE}, max_num_seqs: 4, max_queued_requests: {ROOM - 4}}}
    api: {{api_keys: [{KEY}]}}
"""
PROMPT = "<role>HUMAN</role>What is 7 times 6?<|role_end|><role>ASSISTANT</role>"
MESSAGES: Any = [{"role": "user", "content": "What is 12 plus 30?"}]
PATIENCE_S = 240.0  # seconds, on a machine that does other things too
# Takes seconds: one token a step.
LONG: dict[str, Any] = {
    "max_tokens": 768,
    "min_tokens": 768,
    "diffusion": {"block_length": 32, "decoder": {"kind": "fixed", "steps": 768}},
}


@pytest.mark.parametrize(
    ("arguments", "status", "words"),
    [
        (["/no/such/model"], 1, ["/no/such/model"]),
        (["--no-such-flag"], 2, ["--no-such-flag"]),
        (["--config", "wrong.yaml"], 1, ["wrong.yaml", "'engine_kwarg'", "engine_kwargs"]),
        (["demo", "--port", "TAKEN"], 1, ["TAKEN is in use", "--port"]),
    ],
)
def test_what_is_wrong_is_one_sentence(
    arguments: list[str], status: int, words: list[str], tmp_path: Path
) -> None:
    (tmp_path / "wrong.yaml").write_text("model_loading_config: {model_id: demo}\nengine_kwarg: 1")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        ended = subprocess.run(
            serve_command(*(port if each == "TAKEN" else each for each in arguments)),
            env=environment(tmp_path),
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=100,
        )
    assert ended.returncode == status
    assert "Traceback" not in ended.stderr and ended.stdout == ""
    if status == 1:
        assert ended.stderr.startswith("diffray: ") and ended.stderr.count("\n") == 1
    for word in words:
        assert word.replace("TAKEN", port) in ended.stderr


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServeProcess]:
    config = tmp_path_factory.mktemp("serve") / "models.yaml"
    config.write_text(CONFIG)
    begin = time.monotonic()
    with serve_process("--config", str(config)) as running:
        running.wait_for(" is ready at ", 2)
        print(f"two models are ready after {time.monotonic() - begin:.1f} s")
        yield running


@pytest.fixture(scope="module")
def llms() -> Iterator[dict[str, DiffusionLLM]]:
    """The same models in this process, one request at a time."""
    demo, llada2 = (DiffusionLLM(name, dtype="float64", max_num_seqs=2) for name in MODELS)
    with demo, llada2:
        yield {"demo": demo, "demo-llada2": llada2}


@pytest.fixture(scope="module")
def long_text(llms: dict[str, DiffusionLLM]) -> str:
    (answer,) = llms["demo"].chat(MESSAGES, SamplingParams(**LONG), use_tqdm=False)
    return answer.outputs[0].text


@contextmanager
def openai_client(served: ServeProcess, model: str = "demo", key: str = KEY) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{served.url}/{model}/v1", api_key=key, max_retries=0) as client:
        yield client


def load(served: ServeProcess, model: str) -> dict[str, int]:
    headers = {"Authorization": f"Bearer {KEY}"}
    found: dict[str, int] = httpx2.get(f"{served.url}/{model}/load", headers=headers).json()
    return found


def wait_for_load(served: ServeProcess, model: str, **wanted: int) -> None:
    """Wait until the load is like this."""
    end = time.monotonic() + PATIENCE_S
    while not wanted.items() <= (found := load(served, model)).items():
        assert time.monotonic() < end, found
        time.sleep(0.02)


def aborted(served: ServeProcess, model: str) -> float:
    """Return how many choices were given up."""
    metrics = httpx2.get(f"{served.url}/{model}/metrics").text
    (line,) = re.findall(r"^diffray:request_aborted_total{.*} (.*)$", metrics, re.M)
    return float(line)


@pytest.mark.parametrize("model", MODELS)
def test_a_stock_client_gets_the_answers_of_this_process(
    served: ServeProcess, llms: dict[str, DiffusionLLM], model: str
) -> None:
    wishes: dict[str, Any] = {"max_tokens": 32, "temperature": 0.8, "seed": 5, "n": 2}
    (expected,) = llms[model].chat(MESSAGES, SamplingParams(**wishes, logprobs=True))
    with openai_client(served, model) as client:
        assert [each.id for each in client.models.list()] == [model]
        asked: dict[str, Any] = {"model": model, "messages": MESSAGES} | wishes
        answer = client.chat.completions.create(**asked, logprobs=True, top_logprobs=2)
        told: Any = {"stream": True, "stream_options": {"include_usage": True}}
        chunks = list(client.chat.completions.create(**asked, **told))
        (free,) = llms[model].generate(PROMPT, SamplingParams(max_tokens=24))
        stop = free.outputs[0].text[3:5]
        stopped = client.completions.create(model=model, prompt=PROMPT, max_tokens=24, stop=stop)
    assert answer.usage is not None and chunks[-1].usage == answer.usage
    assert answer.usage.prompt_tokens == expected.prompt_tokens
    assert answer.usage.completion_tokens == expected.completion_tokens
    assert len({chunk.id for chunk in chunks}) == 1
    for choice, ours in zip(expected.outputs, answer.choices, strict=True):
        parts = [c for chunk in chunks for c in chunk.choices if c.index == ours.index]
        assert ours.message.content == choice.text
        assert "".join(part.delta.content or "" for part in parts) == choice.text
        assert parts[-1].finish_reason == ours.finish_reason == choice.finish_reason
        assert ours.logprobs is not None and ours.logprobs.content is not None
        found = [entry.logprob for entry in ours.logprobs.content]
        assert found == pytest.approx(choice.logprobs, abs=1e-6)
        assert all(len(entry.top_logprobs) == 2 for entry in ours.logprobs.content)
    text = free.outputs[0].text
    assert (stopped.choices[0].text, stopped.choices[0].finish_reason) == (
        text[: text.find(stop)],
        "stop",
    )


@pytest.mark.long
def test_the_npm_client_streams(
    served: ServeProcess, llms: dict[str, DiffusionLLM], tmp_path: Path
) -> None:
    told = npm_told(npm_project(tmp_path), f"{served.url}/demo", MESSAGES, KEY)
    (expected,) = llms["demo"].chat(MESSAGES, SamplingParams(max_tokens=40), use_tqdm=False)
    assert told["text"] == told["whole"] == expected.outputs[0].text
    assert told["role"] == "assistant"
    assert told["reason"] == expected.outputs[0].finish_reason
    assert told["usage"] == told["wholeUsage"]
    assert told["usage"]["completion_tokens"] == expected.completion_tokens
    assert told["models"] == ["demo"]
    assert told["refused"] == ["NotFoundError", 404, "model_not_found"]


@pytest.mark.parametrize("model", MODELS)
def test_each_model_has_its_page(served: ServeProcess, model: str) -> None:
    assert f"{model} is ready at {served.url}/{model}/v1\n" in served.said
    answer = httpx2.get(f"{served.url}/{model}", follow_redirects=True)
    assert str(answer.url) == f"{served.url}/{model}/" and "page/app.js" in answer.text
    script = httpx2.get(f"{served.url}/{model}/page/app.js")
    assert script.status_code == 200 and "'self'" in script.headers["content-security-policy"]


@pytest.mark.parametrize("model", MODELS)
def test_each_model_says_that_it_is_a_toy_and_what_to_ask(served: ServeProcess, model: str) -> None:
    said, prompts = f"{model} {TOY}.", list(examples(model))
    url = f"{served.url}/{model}"
    headers = {"Authorization": f"Bearer {KEY}"}
    (listed,) = httpx2.get(f"{url}/v1/models", headers=headers).json()["data"]
    assert (listed["description"], listed["examples"]) == (said, prompts)
    manual = unescape(httpx2.get(f"{url}/docs").text)
    document = httpx2.get(f"{url}/openapi.json").json()
    for text in (manual, document["info"]["description"]):
        assert said in text and all(prompt in text for prompt in prompts)
    assert f"{said}\n" in served.said and f"\n  {prompts[0]}\n" in served.said
    assert "(its dashboard is off; --dashboard starts it)" in served.said


def test_refusals_have_openai_s_classes(served: ServeProcess) -> None:
    asked: dict[str, Any] = {"model": "demo", "messages": MESSAGES}
    with (
        openai_client(served, key="wrong") as stranger,
        pytest.raises(openai.AuthenticationError),
    ):
        stranger.chat.completions.create(**asked)
    with openai_client(served) as client:
        with pytest.raises(openai.NotFoundError) as unknown:
            client.chat.completions.create(model="demo-llada2", messages=MESSAGES)
        assert unknown.value.code == "model_not_found"
        with pytest.raises(openai.BadRequestError) as long:
            client.chat.completions.create(**asked, max_tokens=5000)
        assert long.value.code == "context_length_exceeded"
        with pytest.raises(openai.BadRequestError) as wrong:
            client.chat.completions.create(**asked, extra_body={"diffusion": {"decoder": {}}})
        assert wrong.value.param is not None and "decoder" in wrong.value.param


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
    """Draw requests that differ in everything."""
    draw = random.Random(3)
    bodies = []
    for number in range(count):
        model = MODELS[number % 8 == 7]  # with two choices each the second one is full
        sampled = {"temperature": draw.choice([0.7, 1.3]), "top_p": draw.choice([1.0, 0.9])}
        bodies.append(
            {
                "model": model,
                "messages": [
                    {
                        "role": "user",
                        "content": f"Add {number} and 9." + " Now" * draw.randint(0, 9),
                    }
                ],
                "max_tokens": draw.choice([5, 16, 24, 40]),
                "seed": draw.randrange(2**40),
                "n": draw.choice([1, 1, 1, 2]),
                "stop": draw.choice([[], [], ["1", "is"]]),
                "diffusion": draw.choice(POLICIES[model]),
                "stream": draw.random() < 0.5,
            }
            | draw.choice([{"temperature": 0.0}, sampled])
        )
    return bodies


async def ask(client: AsyncOpenAI, body: dict[str, Any]) -> tuple[list[str], Any, set[str]]:
    """Return the texts, the usage and the ids seen."""
    ours = {name: body[name] for name in ("diffusion", "min_tokens") if name in body}
    own: Any = {name: value for name, value in body.items() if name not in ours}
    own["extra_body"] = ours
    if not body["stream"]:
        answer = await client.chat.completions.create(**own)
        texts = [choice.message.content or "" for choice in answer.choices]
        return texts, answer.usage, {answer.id}
    texts, usage, ids = [""] * body["n"], None, set()
    own["stream_options"] = {"include_usage": True}
    async for chunk in await client.chat.completions.create(**own):
        ids.add(chunk.id)
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
        usage = chunk.usage or usage
    return texts, usage, ids


def test_each_of_64_answers_is_its_solo_answer(
    served: ServeProcess, llms: dict[str, DiffusionLLM]
) -> None:
    bodies = mixed_requests(64)

    async def all_at_once() -> list[tuple[list[str], Any, set[str]]]:
        clients = {
            model: AsyncOpenAI(
                base_url=f"{served.url}/{model}/v1", api_key=KEY, max_retries=0, timeout=300
            )
            for model in MODELS
        }
        async with clients["demo"], clients["demo-llada2"]:
            return await asyncio.gather(*(ask(clients[body["model"]], body) for body in bodies))

    begin = time.monotonic()
    answers = asyncio.run(all_at_once())
    print(f"64 mixed requests took {time.monotonic() - begin:.1f} s")
    assert len(set().union(*(ids for _, _, ids in answers))) == len(bodies)
    for body, (texts, usage, ids) in zip(bodies, answers, strict=True):
        wishes = {k: v for k, v in body.items() if k not in ("model", "messages", "stream")}
        (alone,) = llms[body["model"]].chat(
            body["messages"], SamplingParams(**wishes), use_tqdm=False
        )
        assert texts == [choice.text for choice in alone.outputs], body
        assert usage.prompt_tokens == alone.prompt_tokens
        assert usage.completion_tokens == alone.completion_tokens
        assert len(ids) == 1


def open_stream(served: ServeProcess, model: str) -> socket.socket:
    """Ask for a long answer as many clients do: the headers first, then the body."""
    body = json.dumps({"model": model, "messages": MESSAGES, "stream": True} | LONG).encode()
    head = (
        f"POST /{model}/v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1\r\n"
        f"Authorization: Bearer {KEY}\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(body)}\r\n\r\n"
    )
    connection = socket.create_connection(("127.0.0.1", served.port))
    connection.sendall(head.encode())
    time.sleep(0.02)
    connection.sendall(body)
    return connection


def test_a_full_queue_refuses_and_clients_that_hang_up_leave_nothing(served: ServeProcess) -> None:
    model = MODELS[1]
    before = aborted(served, model)
    with ExitStack() as streams:
        for _ in range(ROOM):
            streams.enter_context(open_stream(served, model))
        wait_for_load(served, model, running=4, waiting=ROOM - 4)
        with (
            openai_client(served, model) as client,
            pytest.raises(openai.RateLimitError) as refused,
        ):
            client.chat.completions.create(model=model, messages=MESSAGES)
    assert int(refused.value.response.headers["retry-after"]) >= 1
    assert refused.value.code == "rate_limit_exceeded"
    pages = load(served, model)["num_pages"]
    wait_for_load(served, model, running=0, waiting=0, free_pages=pages)
    end = time.monotonic() + PATIENCE_S
    while (given_up := aborted(served, model) - before) < ROOM:
        assert time.monotonic() < end, f"only {given_up:g} answers were not written to their ends"
        time.sleep(0.02)


# Asks from a process that does nothing else, over one connection.
WATCH_HEALTH = """
import http.client, json, sys, time
connection = http.client.HTTPConnection("127.0.0.1", int(sys.argv[1]))
took, end = [], time.perf_counter() + 3
while len(took) < 150 and (time.perf_counter() < end or len(took) < 2):
    begin = time.perf_counter()
    connection.request("GET", "/demo/health")
    answer = connection.getresponse()
    answer.read()
    assert answer.status == 200, answer.status
    took.append(time.perf_counter() - begin)
    time.sleep(0.01)
print(json.dumps(took))
"""


def test_health_answers_while_16_streams_run(served: ServeProcess) -> None:
    body: dict[str, Any] = {"model": "demo", "n": 1, "messages": MESSAGES, "stream": True} | LONG

    async def run() -> list[float]:
        async with AsyncOpenAI(
            base_url=f"{served.url}/demo/v1", api_key=KEY, max_retries=0, timeout=300
        ) as client:
            streams = [asyncio.create_task(ask(client, body)) for _ in range(16)]
            await asyncio.to_thread(wait_for_load, served, "demo", running=8, waiting=8)
            watch = await asyncio.create_subprocess_exec(
                *(sys.executable, "-c", WATCH_HEALTH, str(served.port)), stdout=subprocess.PIPE
            )
            text, _ = await watch.communicate()
            still = load(served, "demo")
            for stream in streams:
                stream.cancel()
            await asyncio.wait(streams)
        assert still["running"] == 8, "the streams ended before the watch did"
        found: list[float] = json.loads(text)
        return found

    cuts = [1000 * cut for cut in quantiles(asyncio.run(run()), n=100)]
    print(f"health: p50 {cuts[49]:.1f} ms, p90 {cuts[89]:.1f} ms, p99 {cuts[98]:.1f} ms")


def stream_text(client: OpenAI) -> Iterator[str]:
    """Yield the pieces of a long answer."""
    body: dict[str, Any] = {"model": "demo", "messages": MESSAGES, "extra_body": LONG}
    for chunk in client.chat.completions.create(**body, stream=True):
        if chunk.choices and (text := chunk.choices[0].delta.content):
            yield text


@pytest.mark.long
@pytest.mark.core
def test_a_killed_rank_costs_a_pause_and_no_letter(served: ServeProcess, long_text: str) -> None:
    wait_for_load(served, "demo", running=0)
    with openai_client(served) as client:
        pieces = stream_text(client)
        text = next(pieces)
        os.kill(served.busiest("ray::Worker"), signal.SIGKILL)
        last, gap = time.monotonic(), 0.0
        for piece in pieces:
            text += piece
            gap, last = max(gap, time.monotonic() - last), time.monotonic()
    print(f"the stream paused for {gap:.1f} s")
    assert gap > 0.3, "the answer was complete before the rank was killed"
    assert text == long_text
    served.wait_for("; 1 request continues on a new worker group", 1)
    assert "(raylet)" not in served.said, served.said
    metrics = httpx2.get(f"{served.url}/demo/metrics").text
    assert re.search(
        r'^diffray:num_restarts_total{model_name="demo",replica="\w+"} 1.0$', metrics, re.M
    )


def test_ctrl_c_lets_answers_finish_and_leaves_no_process(
    served: ServeProcess, long_text: str
) -> None:
    wait_for_load(served, "demo", running=0)
    started = served.processes()
    for name in ("raylet", "ray::DashboardAgent", "ray::Coordinator", "ray::Worker"):
        assert name in str(started)
    with openai_client(served) as client:
        pieces = stream_text(client)
        text = next(pieces)
        served.interrupt()
        begin = time.monotonic()
        text += "".join(pieces)
        finished = time.monotonic()
    assert finished - begin > 0.2, "the answer was complete before Ctrl-C"
    assert text == long_text
    assert served.process.wait(timeout=120) == 0
    ended = time.monotonic()
    print(f"the answer took {finished - begin:.1f} s more, the end {ended - finished:.1f} s")
    assert "Traceback" not in served.said
    assert not [pid for pid in started if Path(f"/proc/{pid}").exists()]
    assert served.processes() == {}
    socket.create_server(("127.0.0.1", served.port)).close()
