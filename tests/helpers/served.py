"""Two models behind an ingress, one of them on two replicas, and what tests ask of the server."""

import json
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from socket import create_connection, socket
from typing import Any

import httpx2
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from tools.serve_process import ServeProcess

KEY, OPERATOR = "a-key", "an-operator-s-key"
HEADERS, OPERATES = ({"Authorization": f"Bearer {key}"} for key in (KEY, OPERATOR))
MODELS = ("demo", "demo-llada2")
ROOM = 16  # of the second model, in slots and in its queue
ENGINE = "dtype: float64, device: cpu, cpu_threads: 1, check_every: 8"
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
ingress:
  num_replicas: 1
  api: {{api_keys: [{KEY}], operator_keys: [{OPERATOR}], files: FILES}}
"""
MESSAGES: Any = [{"role": "user", "content": "What is 12 plus 30?"}]
PATIENCE_S = 240.0  # seconds for what takes few, on a machine that does other things too
LONG_S = 4.0  # seconds that a long answer takes alone
MOST_LONG = 896  # and the most tokens of it, as the context has 1,024


def one_token_a_step(tokens: int) -> dict[str, Any]:
    diffusion = {"block_length": 32, "decoder": {"kind": "fixed", "steps": tokens}}
    return {"max_tokens": tokens, "min_tokens": tokens, "diffusion": diffusion}


def wait_until(holds: Callable[[], bool]) -> None:
    end = time.monotonic() + PATIENCE_S
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.05)


def text_of(answer: httpx2.Response) -> str:
    assert answer.status_code == 200, answer.text
    text: str = answer.json()["choices"][0]["message"]["content"]
    return text


def pieces_of(url: str, body: dict[str, Any], headers: dict[str, str]) -> Iterator[str]:
    """Yield the pieces of a stream, and then how it ended."""
    asked = body | {"stream": True}
    with httpx2.stream("POST", url, json=asked, headers=headers, timeout=PATIENCE_S) as answer:
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


def open_stream(port: int, body: dict[str, Any], path: str = "", pause: float = 0.0) -> socket:
    """Ask for a chat as many clients do: the headers, and the body after a pause."""
    text = json.dumps(body | {"messages": MESSAGES, "stream": True}).encode()
    head = (
        f"POST {path}/v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1\r\n"
        f"Authorization: Bearer {KEY}\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(text)}\r\n\r\n"
    )
    connection = create_connection(("127.0.0.1", port), timeout=PATIENCE_S)
    connection.sendall(head.encode())
    time.sleep(pause)
    connection.sendall(text)
    return connection


@dataclass(frozen=True)
class Served(ServeProcess):
    def post(self, model: str, path: str = "", **options: Any) -> httpx2.Response:
        body = {"model": model, "messages": MESSAGES} | options
        url = f"{self.url}{path}/v1/chat/completions"
        return httpx2.post(url, json=body, headers=HEADERS, timeout=PATIENCE_S)

    @cached_property
    def long(self) -> dict[str, dict[str, Any]]:
        """Each model's options for an answer that takes seconds, however fast the processor is."""

        def seconds(model: str, tokens: int) -> float:
            begin = time.monotonic()
            assert text_of(self.post(model, f"/{model}", **one_token_a_step(tokens)))
            return time.monotonic() - begin

        each = {model: min(seconds(model, 32) for _ in range(3)) / 32 for model in MODELS}
        tokens = {model: int(LONG_S / each[model]) // 32 * 32 for model in MODELS}
        return {
            model: one_token_a_step(min(max(tokens[model], 128), MOST_LONG)) for model in MODELS
        }

    def chunks(self, model: str, path: str = "") -> Iterator[str]:
        body = {"model": model, "messages": MESSAGES} | self.long[model]
        yield from pieces_of(f"{self.url}{path}/v1/chat/completions", body, HEADERS)

    @cached_property
    def long_texts(self) -> dict[str, str]:
        """What each model writes at its own path, undisturbed."""
        return {
            model: text_of(self.post(model, f"/{model}", **self.long[model])) for model in MODELS
        }

    def streamed(self, model: str, path: str = "") -> tuple[str, str]:
        *pieces, end = self.chunks(model, path)
        return "".join(pieces), end

    def health(self) -> dict[str, str]:
        found: dict[str, str] = httpx2.get(f"{self.url}/health").json()["models"]
        return found

    def load(self, path: str = "") -> dict[str, int]:
        found: dict[str, int] = httpx2.get(f"{self.url}{path}/load", headers=HEADERS).json()
        return found

    def wait_for_load(self, **wanted: int) -> None:
        end = time.monotonic() + PATIENCE_S
        while not wanted.items() <= (found := self.load()).items():
            assert time.monotonic() < end, found
            time.sleep(0.02)

    def samples(self) -> list[Sample]:
        """Return all series once every replica's are there; the ingress leaves out late ones."""
        end = time.monotonic() + PATIENCE_S
        while True:
            families = text_string_to_metric_families(httpx2.get(f"{self.url}/metrics").text)
            found = [each for family in families for each in family.samples]
            if sum(each.name.endswith("_updates_total") for each in found) == 3:
                return found
            assert time.monotonic() < end, found
            time.sleep(0.2)

    def total(self, name: str, **labels: str) -> float:
        """Return the sum of the series with these labels, as the ingress shows them."""
        return sum(
            sample.value
            for sample in self.samples()
            if sample.name == f"diffray:{name}" and labels.items() <= sample.labels.items()
        )
