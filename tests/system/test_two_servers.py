"""Two servers on one machine: neither ever answers the other's clients, whatever dies.

The tests share the servers and stand in an order.
"""

import http.client
import json
import os
import signal
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, closing
from itertools import cycle
from typing import NamedTuple

import httpx2
import pytest

from tests.helpers.nodes import clients
from tools.serve_process import ServeProcess, serve_process

pytestmark = pytest.mark.long

KEY = "a-key"
BODY = json.dumps({"prompt": "hello", "max_tokens": 8})
ASKED = {("POST", "/v1/completions"): BODY, ("GET", "/v1/models"): None, ("GET", "/metrics"): None}
SHARED = {52365}  # Ray's dashboard agent has no other port; it asks for Ray's token


class Answer(NamedTuple):
    asked: float  # when
    status: int  # 0: the connection was refused or broken
    text: str


@pytest.fixture(scope="module")
def servers() -> Iterator[tuple[ServeProcess, ServeProcess]]:
    """A server of one model for everybody, and one of another model for those with its key."""
    with serve_process("demo", "--device", "cpu") as one:
        one.wait_for(" is ready at ", 1)
        with serve_process("demo-llada2", "--device", "cpu", "--api-key", KEY) as two:
            two.wait_for(" is ready at ", 1)
            yield one, two


def asking(server: ServeProcess, key: str = "") -> AbstractContextManager[list[Answer]]:
    """Ask all the time, each thing in turn; yields the answers, which grow."""
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {key}"}
    what = cycle(ASKED.items())

    def ask() -> Answer:
        (method, path), body = next(what)
        begin = time.monotonic()
        connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=100)
        with closing(connection):
            try:
                connection.request(method, path, body, headers)
                answer = connection.getresponse()
                return Answer(begin, answer.status, answer.read().decode())
            except (OSError, http.client.HTTPException):
                return Answer(begin, 0, "")
            finally:
                time.sleep(0.01)

    return clients(1, ask)


def kill(server: ServeProcess, name: str) -> float:
    pids = [pid for pid, line in server.processes().items() if name in line]
    assert pids, f"nothing runs as {name}"
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    return time.monotonic()


def wait_until_answered(answers: list[Answer], since: float, count: int = 9) -> None:
    end = time.monotonic() + 150
    while True:
        last = [each for each in answers[-count:] if each.asked > since]
        if len(last) == count and all(each.status == 200 for each in last):
            return
        assert time.monotonic() < end, answers[-count:]
        time.sleep(0.1)


def check(answers: list[Answer], own: str, other: str) -> None:
    """What is answered comes from the own server; what is not may be asked for again."""
    assert answers
    for each in answers:
        assert each.status in (0, 200, 500, 502, 503), each
        assert f'"{other}"' not in each.text, each
        if each.status == 200:
            assert f'"{own}"' in each.text, each
        elif each.status == 503:
            assert json.loads(each.text)["error"]["code"] == "engine_unavailable"


def test_no_port_is_shared(servers: tuple[ServeProcess, ServeProcess]) -> None:
    one, two = ({port for _, port in each.listening()} - SHARED for each in servers)
    assert not one & two
    for each in servers:
        assert [host for host, _ in each.listening() if host != "127.0.0.1"] == ["::"]


def longest_refusal(answers: list[Answer]) -> float:
    longest, begin = 0.0, None
    for each in answers:
        if each.status:
            begin = None
        else:
            begin = each.asked if begin is None else begin
            longest = max(longest, each.asked - begin)
    return longest


@pytest.mark.parametrize("name", ["ray::ServeReplica", "ray::ProxyActor"])
def test_deaths_mix_up_no_clients(servers: tuple[ServeProcess, ServeProcess], name: str) -> None:
    one, two = servers
    with asking(one) as ones, asking(two, KEY) as twos:
        wait_until_answered(ones, 0.0)
        wait_until_answered(twos, 0.0)
        killed = kill(one, name)
        time.sleep(8)  # what Serve has begun to mend is seen as broken by now
        wait_until_answered(ones, time.monotonic())
        wait_until_answered(twos, killed)
    check(ones, "demo", "demo-llada2")
    check(twos, "demo-llada2", "demo")
    assert longest_refusal([each for each in ones if each.asked > killed]) < 15
    assert all(each.status == 200 for each in twos)


def test_an_ending_server_sends_none_away(servers: tuple[ServeProcess, ServeProcess]) -> None:
    one, two = servers
    with asking(one) as ones, asking(two, KEY) as twos:
        wait_until_answered(ones, 0.0)
        one.process.terminate()
        assert one.process.wait(120) == 0
    check(ones, "demo", "demo-llada2")
    check(twos, "demo-llada2", "demo")
    assert all(each.status == 200 for each in twos)
    with pytest.raises(httpx2.ConnectError):
        httpx2.get(f"{one.url}/health")
    assert one.processes() == {}
