"""A small HTTP server that answers as a test wants, for tests of the API's clients."""

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from tests.helpers.http_server import Handler, listening

Json = dict[str, Any]


@dataclass
class Answer:
    """`chunks` are sent as server-sent events, each when it is asked for."""

    status: int = 200
    body: Json = field(default_factory=dict)
    headers: dict[str, str] = field(default_factory=dict)
    chunks: Iterator[Json | str] | None = None
    hang_up: bool = False


@dataclass
class Asked:
    path: str
    body: Json
    headers: dict[str, str]


@dataclass
class FakeEndpoint:
    url: str
    asked: list[Asked] = field(default_factory=list)
    # Set when a client has left before its answer's end.
    hung_up: threading.Event = field(default_factory=threading.Event)


@contextmanager
def fake_endpoint(answer: Callable[[Asked], Answer]) -> Iterator[FakeEndpoint]:
    """Serve on a free port until the block ends; GET requests have an empty body."""

    class Endpoint(Handler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            self._answer({})

        def do_POST(self) -> None:
            length = int(self.headers["content-length"])
            self._answer(json.loads(self.rfile.read(length)))

        def _answer(self, body: Json) -> None:
            try:
                self._reply(body)
            except OSError:
                self.close_connection = True
                endpoint.hung_up.set()

        def _reply(self, body: Json) -> None:
            asked = Asked(self.path, body, {k.lower(): v for k, v in self.headers.items()})
            endpoint.asked.append(asked)
            made = answer(asked)
            if made.hang_up:
                self.close_connection = True
                return
            if made.chunks is not None:
                self._stream(made.chunks)
            else:
                kind = {"Content-Type": "application/json"}
                self.say(made.status, json.dumps(made.body).encode(), **kind, **made.headers)

        def _stream(self, chunks: Iterator[Json | str]) -> None:
            self.send_response(200)
            self.send_header("content-type", "text/event-stream")
            self.send_header("connection", "close")
            self.end_headers()
            self.close_connection = True
            for chunk in chunks:
                text = chunk if isinstance(chunk, str) else json.dumps(chunk)
                self.wfile.write(f"data: {text}\n\n".encode())
                self.wfile.flush()

    endpoint = FakeEndpoint("")
    with listening(Endpoint) as port:
        endpoint.url = f"http://127.0.0.1:{port}"
        yield endpoint
