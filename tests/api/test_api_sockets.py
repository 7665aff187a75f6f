"""Clients that misbehave below HTTP: bounded in time and memory, and all pages come back."""

import asyncio
import json
import socket
import struct
import time
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx2
import pytest

from diffray.cluster.api import http as api_http
from diffray.cluster.api.http import EventStream
from diffray.cluster.api.settings import ApiSettings
from tests.helpers.api_server import Served, serve, serve_model
from tests.helpers.tiny import tiny_checkpoint

PATH = "/v1/completions"
HEAD = f"POST {PATH} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
LONG = json.dumps(
    {
        "prompt": "abc",
        "max_tokens": 180,
        "ignore_eos": True,
        "stream": True,
        "diffusion": {"block_length": 8, "decoder": {"kind": "fixed", "steps": 8}},
    }
)


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    model = tiny_checkpoint(tmp_path_factory.mktemp("sockets") / "model")
    with serve_model(model, "tiny", ApiSettings(body_timeout_s=0.5), max_model_len=256) as served:
        yield served


@pytest.fixture(autouse=True)
def nothing_is_left(served: Served) -> Iterator[None]:
    """After each test the server is healthy, and nothing runs, waits or holds a page."""
    yield
    assert httpx2.get(f"{served.url}/health").status_code == 200
    until(lambda: idle(served))


def idle(served: Served) -> bool:
    load: dict[str, int] = httpx2.get(f"{served.url}/load").json()
    return not (load["running"] or load["waiting"]) and load["free_pages"] == load["num_pages"]


def until(true: Callable[[], bool], seconds: float = 30) -> None:
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end, "it did not come to that"
        time.sleep(0.01)


def connect(url: str) -> socket.socket:
    port = int(url.rpartition(":")[2])
    return socket.create_connection(("127.0.0.1", port), timeout=30)


def read_all(client: socket.socket) -> bytes:
    """Return what comes until the server closes."""
    parts = []
    with suppress(ConnectionError):
        while part := client.recv(65536):
            parts.append(part)
    return b"".join(parts)


def with_length(body: str, more: int = 0) -> bytes:
    return f"{HEAD}Content-Length: {len(body) + more}\r\n\r\n{body}".encode()


def test_a_body_that_drips_is_cut_off(served: Served) -> None:
    with connect(served.url) as client:
        client.sendall(with_length("", 1000))
        begin = time.monotonic()
        with suppress(ConnectionError):
            while time.monotonic() < begin + 20 and not _readable(client):
                client.sendall(b" ")
                time.sleep(0.05)
        answer = read_all(client)
    assert time.monotonic() - begin < 20
    head, _, body = answer.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 408") and b"connection: close" in head.lower()
    assert json.loads(body)["error"]["code"] == "request_timeout"


def _readable(client: socket.socket) -> bool:
    client.setblocking(False)
    try:
        return bool(client.recv(1, socket.MSG_PEEK))
    except BlockingIOError:
        return False
    finally:
        client.setblocking(True)
        client.settimeout(30)


@pytest.mark.parametrize(
    "sent",
    [
        with_length('{"prompt": "a', 50),
        with_length("", 50),
        (HEAD + "Transfer-Encoding: chunked\r\n\r\n5\r\n{").encode(),
        HEAD.encode(),
        b"POST",
        b"",
    ],
)
@pytest.mark.parametrize("reset", [False, True])
def test_a_disconnect_during_a_request_leaves_nothing(
    served: Served, sent: bytes, reset: bool
) -> None:
    with connect(served.url) as client:
        client.sendall(sent)
        if reset:  # close with a reset instead of a goodbye
            client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))


def test_a_half_closed_connection_holds_nothing(served: Served) -> None:
    """Its client may still read, or may be gone."""
    with connect(served.url) as client:
        client.sendall(with_length(LONG))
        assert client.recv(1)
        client.shutdown(socket.SHUT_WR)
        begin = time.monotonic()
        read_all(client)
    assert time.monotonic() - begin < 20


@pytest.mark.parametrize("reset", [False, True])
def test_a_disconnect_during_a_stream_frees_its_pages(served: Served, reset: bool) -> None:
    with connect(served.url) as client:
        client.sendall(with_length(LONG))
        assert client.recv(100)
        if reset:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))


@pytest.mark.parametrize(
    "garbage",
    [
        b"\0\0\0\0\r\n\r\n",
        b"GET\r\n\r\n",
        b"GET / HTTP/9.9\r\n\r\n",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
        b"GET / HTTP/1.1\r\nHost: x\r\nContent-Length: -5\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\nContent-Length: 6\r\n\r\n",
        (HEAD + "Transfer-Encoding: chunked\r\n\r\nxyz\r\n").encode(),
        (HEAD + "Transfer-Encoding: chunked\r\n\r\nfffffffffffffffff\r\n").encode(),
        (HEAD + "Content-Length: 3\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n").encode(),
        (HEAD + "Content-Length: 99999999999999999999999\r\n\r\n{}").encode(),
    ],
)
def test_garbage_is_refused_alone_and_behind_a_request(served: Served, garbage: bytes) -> None:
    with connect(served.url) as client:
        client.sendall(garbage)
        client.shutdown(socket.SHUT_WR)
        assert _no_failure(read_all(client))
    with connect(served.url) as client:
        client.sendall(b"GET /version HTTP/1.1\r\nHost: x\r\n\r\n" + garbage)
        # Whether what came before is answered too depends on whose parser reads it.
        assert client.recv(65536).startswith((b"HTTP/1.1 200", b"HTTP/1.1 400"))
        client.shutdown(socket.SHUT_WR)
        assert _no_failure(read_all(client))


def _no_failure(answer: bytes) -> bool:
    return not any(line.startswith(b"HTTP/1.1 5") for line in answer.split(b"\r\n"))


def test_many_requests_at_once_on_one_connection_are_answered_in_order(served: Served) -> None:
    ask = b"GET /version HTTP/1.1\r\nHost: x\r\nX-Request-Id: %d\r\n\r\n"
    last = b"GET /version HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"
    with connect(served.url) as client:
        client.sendall(b"".join(ask % number for number in range(50)) + last)
        answers = read_all(client).lower()
    ids = [answers.find(b"x-request-id: %d\r" % number) for number in range(50)]
    assert ids == sorted(ids) and ids[0] > 0


@pytest.mark.parametrize("announced", [True, False])
def test_a_body_without_end_takes_no_memory(served: Served, announced: bool) -> None:
    """It is refused at the limit; the rest is discarded."""
    before, piece = _memory(), b"x" * 2**20
    length = f"Content-Length: {2**40}" if announced else "Transfer-Encoding: chunked"
    with serve(served.service) as url, connect(url) as client:
        client.sendall(f"{HEAD}{length}\r\n\r\n".encode())
        sent = 0
        with suppress(ConnectionError, TimeoutError):
            while sent < 100:
                client.sendall(piece if announced else b"%x\r\n%s\r\n" % (len(piece), piece))
                sent += 1
        assert client.recv(100).startswith(b"HTTP/1.1 413")
    assert _memory() - before < 64 * 2**20


def _memory() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def test_a_stream_that_is_not_read_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
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

    async def scenario() -> None:
        rest = chunks()
        stream = EventStream(await anext(rest), rest)
        async with asyncio.timeout(60):
            await stream({"type": "http"}, receive, send)  # type: ignore[arg-type]

    asyncio.run(scenario())
    assert closed


def test_each_app_has_its_own_body_timeout(served: Served) -> None:
    with serve(served.service, ApiSettings(body_timeout_s=30)) as url:
        body = json.dumps({"prompt": "abc", "max_tokens": 2})

        def slowly() -> Iterator[bytes]:
            yield body[:5].encode()
            time.sleep(0.7)
            yield body[5:].encode()

        headers = {"Content-Type": "application/json"}
        assert httpx2.post(url + PATH, content=slowly(), headers=headers).status_code == 200
        assert httpx2.post(served.url + PATH, content=slowly(), headers=headers).status_code == 408
