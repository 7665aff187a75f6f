"""Clients that misbehave below HTTP: bounded in time and memory, and all pages come back."""

import asyncio
import json
import re
import socket
import struct
import time
from collections.abc import AsyncGenerator, Iterator
from contextlib import suppress
from dataclasses import replace
from select import select
from typing import Any

import httpx2
import pytest

from diffray.cluster.api import http as api_http
from diffray.cluster.api.http import EventStream
from diffray.cluster.api.settings import ApiSettings
from tests.helpers.api_server import Served, serve
from tests.helpers.served import wait_until

PATH = "/v1/completions"
HEAD = f"POST {PATH} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
LONG: dict[str, Any] = {
    "prompt": "abc", "n": 2, "max_tokens": 180, "ignore_eos": True,
    "diffusion": {"block_length": 8, "decoder": {"kind": "fixed", "steps": 8}},
}  # fmt: skip
RESET = struct.pack("ii", 1, 0)  # of SO_LINGER: close with a reset instead of a goodbye


@pytest.fixture(scope="module")
def served(tiny: Served) -> Iterator[Served]:
    with serve(tiny.service, ApiSettings(body_timeout_s=0.5)) as url:
        yield replace(tiny, url=url)


@pytest.fixture(autouse=True)
def nothing_is_left(served: Served) -> Iterator[None]:
    """After each test the server is healthy, and nothing runs, waits or holds a page."""
    yield
    assert httpx2.get(f"{served.url}/health").status_code == 200
    wait_until(lambda: idle(served))


def idle(served: Served) -> bool:
    load: dict[str, int] = httpx2.get(f"{served.url}/load").json()
    return not (load["running"] or load["waiting"]) and load["free_pages"] == load["num_pages"]


def connect(url: str) -> socket.socket:
    port = int(url.rpartition(":")[2])
    return socket.create_connection(("127.0.0.1", port), timeout=30)


def read_all(client: socket.socket) -> bytes:
    parts = []
    with suppress(ConnectionError):
        while part := client.recv(65536):
            parts.append(part)
    return b"".join(parts)


def with_length(body: str, more: int = 0) -> bytes:
    return f"{HEAD}Content-Length: {len(body) + more}\r\n\r\n{body}".encode()


def test_a_body_that_drips_is_cut_off(served: Served) -> None:
    begin = time.monotonic()
    with connect(served.url) as client:
        client.sendall(with_length("", 1000))
        with suppress(ConnectionError):
            while time.monotonic() < begin + 20 and not select([client], [], [], 0.05)[0]:
                client.sendall(b" ")
        answer = read_all(client)
    assert time.monotonic() - begin < 20
    head, _, body = answer.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 408") and b"connection: close" in head.lower()
    assert json.loads(body)["error"]["code"] == "request_timeout"


@pytest.mark.parametrize(
    "sent",
    [
        with_length('{"prompt": "a', 50),
        (HEAD + "Transfer-Encoding: chunked\r\n\r\n5\r\n{").encode(),
        HEAD.encode(),
    ],
)
@pytest.mark.parametrize("reset", [False, True])
def test_a_cut_off_request_leaves_nothing(served: Served, sent: bytes, reset: bool) -> None:
    with connect(served.url) as client:
        client.sendall(sent)
        if reset:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)


def aborted(served: Served) -> float:
    text = httpx2.get(f"{served.url}/metrics").text
    (value,) = re.findall(r"^diffray:request_aborted_total{.*} (.*)", text, re.M)
    return float(value)


@pytest.mark.parametrize("how", ["whole", "closed", "reset", "half closed"])
def test_a_disconnect_during_an_answer_frees_its_pages(served: Served, how: str) -> None:
    """Of a whole answer as of a stream."""
    before = aborted(served)
    with connect(served.url) as client:
        client.sendall(with_length(json.dumps(LONG | {"stream": how != "whole"})))
        if how == "whole":
            wait_until(lambda: not idle(served))
        else:
            assert client.recv(100)
        if how == "reset":
            client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
        elif how == "half closed":  # the client may still read, or may be gone
            client.shutdown(socket.SHUT_WR)
            begin = time.monotonic()
            read_all(client)
            assert time.monotonic() - begin < 20
    wait_until(lambda: idle(served))
    assert aborted(served) == before + 2


@pytest.mark.parametrize("announced", [True, False])
def test_a_body_without_end_is_refused_before_it_is_there(tiny: Served, announced: bool) -> None:
    length = f"Content-Length: {2**40}" if announced else "Transfer-Encoding: chunked"
    body = "" if announced else "800\r\n" + "x" * 2048 + "\r\n"
    with serve(tiny.service, ApiSettings(max_body_bytes=1000)) as url, connect(url) as client:
        client.sendall(f"{HEAD}{length}\r\n\r\n{body}".encode())
        assert client.recv(100).startswith(b"HTTP/1.1 413")


async def test_a_stream_that_is_not_read_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(api_http, "_STALLED_S", 0.05)
    closed = False

    async def chunks() -> AsyncGenerator[dict[str, Any], None]:
        nonlocal closed
        try:
            while True:
                yield {}
        finally:
            closed = True

    async def receive() -> dict[str, Any]:
        await asyncio.sleep(60)
        return {"type": "http.disconnect"}

    async def send(message: dict[str, Any]) -> None:
        if message["type"] == "http.response.body":
            await asyncio.sleep(60)

    rest = chunks()
    stream = EventStream(await anext(rest), rest)
    async with asyncio.timeout(60):
        await stream({"type": "http"}, receive, send)  # type: ignore[arg-type]
    assert closed
