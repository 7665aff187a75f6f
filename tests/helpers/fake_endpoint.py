"""A small HTTP server that answers as a test wants, for tests of the API's clients."""

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

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
    """What the server was sent."""

    path: str
    body: Json
    headers: dict[str, str]


@dataclass
class FakeEndpoint:
    url: str
    asked: list[Asked] = field(default_factory=list)
    hung_up: threading.Event = field(
        default_factory=threading.Event
    )  # a client left before its answer's end


@contextmanager
def fake_endpoint(answer: Callable[[Asked], Answer]) -> Iterator[FakeEndpoint]:
    """Serve on a free port until the block ends; GET requests have an empty body."""

    class Handler(BaseHTTPRequestHandler):
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
            self.send_response(made.status)
            for name, value in made.headers.items():
                self.send_header(name, value)
            if made.chunks is not None:
                self._stream(made.chunks)
                return
            content = json.dumps(made.body).encode()
            self.send_header("content-type", "application/json")
            self.send_header("content-length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def _stream(self, chunks: Iterator[Json | str]) -> None:
            self.send_header("content-type", "text/event-stream")
            self.send_header("connection", "close")
            self.end_headers()
            self.close_connection = True
            for chunk in chunks:
                text = chunk if isinstance(chunk, str) else json.dumps(chunk)
                self.wfile.write(f"data: {text}\n\n".encode())
                self.wfile.flush()

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    endpoint = FakeEndpoint(f"http://127.0.0.1:{server.server_port}")
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield endpoint
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
