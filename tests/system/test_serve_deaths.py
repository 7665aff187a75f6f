"""Whatever ends `diffray serve`, and whatever of it dies: nothing is left, and it says why.

All servers listen on the same port, one after the other.
"""

import os
import signal
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from itertools import product
from typing import Any

import pytest
import ray

from diffray.cluster.serve.address import Server
from diffray.cluster.serve.config_file import applications
from diffray.cluster.serve.ray_session import running_ray
from diffray.cluster.serve.supervisor import Ending
from diffray.components.checkpoints.demos import examples
from tests.helpers.nodes import clients
from tests.helpers.served import open_stream
from tools.serve_process import ServeProcess, free_port, serve_process

GONE_S = 15.0  # after which nothing may be left
BUSY = 4  # times slower than alone, on a machine that does other things too
STREAMS = 4
READY = [
    "Starting Ray", "Ray was not up within", "Loading demo", "demo is ready at", "Ray is at",
    "demo is a toy",
    "Prompts to try:", *examples("demo"), "Chat with demo", "Chat in another terminal",
    "Its API is described at", "loading demo on 1 ranks", "1 ranks ready after",
]  # fmt: skip
LONG: dict[str, Any] = {
    "model": "demo", "max_tokens": 900, "min_tokens": 900,
    "diffusion": {"block_length": 32, "decoder": {"kind": "fixed", "steps": 900}},
}  # fmt: skip


@pytest.fixture(scope="module")
def port() -> int:
    return free_port()


@contextmanager
def streams(served: ServeProcess) -> Iterator[None]:
    """Hold some streams open that have begun, while others ask for new ones all the time."""

    def ask_and_leave() -> None:
        with suppress(OSError), open_stream(served.port, LONG) as connection:
            time.sleep(0.1)
            connection.setblocking(False)

    with ExitStack() as stack:
        for held in [stack.enter_context(open_stream(served.port, LONG)) for _ in range(STREAMS)]:
            assert held.recv(100).startswith(b"HTTP/1.1 200")
        with clients(1, ask_and_leave):
            yield


# What gets which signal; the exit status, and the last words printed.
DEATHS = [
    pytest.param(
        *("raylet/raylet ", "SIGKILL", "streams", 1, "Ray's raylet has died"),
        marks=pytest.mark.core,
    ),
    ("group", "SIGTERM", "idle", 0, "a second Ctrl-C"),
    ("group", "SIGHUP", "streams", 129, "the terminal was closed"),
    ("group", "SIGKILL", "streams", -9, "a second Ctrl-C"),
    ("group", "SIGHUP", "idle", 129, "a second Ctrl-C"),
    ("server", "SIGKILL", "streams", 137, "was killed (SIGKILL)"),
    ("gcs_server ", "SIGKILL", "idle", 1, "Ray's gcs_server has died"),
]


@pytest.mark.long
@pytest.mark.rotate(2)
@pytest.mark.parametrize(("what", "signal_name", "load", "status", "words"), DEATHS)
def test_an_end_leaves_nothing_behind_and_says_why(
    what: str, signal_name: str, load: str, status: int, words: str, port: int
) -> None:
    number = signal.Signals[signal_name]
    with serve_process("demo", "--device", "cpu", "--cpu-threads", "1", port=port) as served:
        served.wait_for(" is ready at ", 1)
        files = served.files()
        with ExitStack() as stack:
            if load == "streams":
                stack.enter_context(streams(served))
            if what == "group":
                os.killpg(served.process.pid, number)
            elif what == "server":
                os.kill(served.server_pid(), number)
            else:
                os.kill(served.pid(what), number)
            assert served.process.wait(BUSY * GONE_S) == status, served.said
            served.is_gone(files, BUSY * GONE_S)
        lines = served.said.splitlines()
        assert "Traceback" not in served.said and words in served.said, served.said
        if load == "idle" and number != signal.SIGKILL:
            ours = [*READY, "the terminal was closed", "a second Ctrl-C"]
            assert all(any(each in line for each in ours) for line in lines), served.said


PHASES = ["", "Starting Ray", "gcs_server", "raylet/raylet ", "ray::ProxyActor", "Loading demo"]


def wait_for_phase(served: ServeProcess, phase: str) -> None:
    end = time.monotonic() + 120
    while len(served.processes()) < 2:  # before, Python itself ends the one that there is
        assert time.monotonic() < end, served.said
        time.sleep(0.02)
    while phase not in served.said and phase not in str(served.processes()):
        assert served.process.poll() is None and time.monotonic() < end, served.said
        time.sleep(0.02)


@pytest.mark.long
@pytest.mark.rotate(2)
@pytest.mark.parametrize(
    ("signal_name", "phase"),
    [
        *product(("SIGINT", "SIGKILL"), PHASES),
        ("SIGTERM", "Loading demo"),
        ("SIGHUP", "Loading demo"),
    ],
)
def test_a_signal_at_the_start_leaves_nothing(phase: str, signal_name: str, port: int) -> None:
    number = signal.Signals[signal_name]
    with serve_process("demo", "--device", "cpu", port=port) as served:
        wait_for_phase(served, phase)
        files = served.files()
        os.killpg(served.process.pid, number)
        status = {signal.SIGHUP: 129, signal.SIGKILL: -9}.get(number, 0)
        assert served.process.wait(BUSY * GONE_S) == status, served.said
        served.is_gone(files, BUSY * GONE_S)
        assert "Traceback" not in served.said and "(raylet)" not in served.said, served.said


@pytest.mark.long
def test_one_of_two_starts_on_a_port_is_refused_at_once(port: int) -> None:
    """And so is the other, when another process takes the port while its Ray is started."""
    with serve_process("demo", "--device", "cpu", port=port) as first:
        first.wait_for("Starting Ray", 1)
        with serve_process("demo", "--device", "cpu", port=port) as second:
            assert second.process.wait(60) == 1
            assert second.said == f"diffray: port {port} is in use; give another --port\n"
        with socket.create_server(("127.0.0.1", port)):
            assert first.process.wait(120) == 1
        assert f"diffray: port {port} is in use; give another --port\n" in first.said
        assert first.said.count("\n") == 2, first.said
        first.is_gone(set(), BUSY * GONE_S)


@pytest.mark.long
def test_a_device_that_this_machine_lacks_is_refused(port: int) -> None:
    with serve_process("demo", "--device", "cuda", "--replicas", "1000", port=port) as served:
        assert served.process.wait(120) == 1
        assert "the replicas need 1000 GPU, and this machine has" in served.said
        assert served.said.count("\n") == 2, served.said
        served.is_gone(set(), BUSY * GONE_S)


@pytest.mark.slow
def test_a_failing_ray_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(**options: Any) -> None:
        raise Exception("The current node timed out during startup.\nThis could happen because")

    monkeypatch.setattr(ray, "init", fail)
    model = applications({"model_loading_config": {"model_id": "demo"}}, "a test")
    with (
        pytest.raises(ValueError, match=r"Ray could not be started: .* startup\. This could"),
        running_ray(model, Server(), Ending(os.getppid()), lambda: None),
    ):
        pass
