"""`diffray status` ends soon and with one sentence where there is nothing to look at."""

import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from diffray.cluster.cli import status

AS_RAYLET = "import sys, time; print('up', flush=True); time.sleep(600)"


@contextmanager
def raylet(address: str) -> Iterator[None]:
    command = ["raylet", "-c", AS_RAYLET, f"--gcs-address={address}"]
    with subprocess.Popen(command, executable=sys.executable, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        yield
        process.kill()


def test_a_missing_cluster_is_reported_at_once() -> None:
    for address in ("127.0.0.1:1", "127.0.0.1:99999"):
        begin = time.monotonic()
        with pytest.raises(ValueError, match=f"no Ray cluster answers at {address} "):
            status.cluster_status(address)
        assert time.monotonic() - begin < 40
    with pytest.raises(ValueError, match=r"expected HOST:PORT .*'nowhere'"):
        status.cluster_status("nowhere")


@pytest.mark.slow
def test_something_else_that_listens_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_AUTH_TOKEN", "of-a-test")  # else one of the user's home is needed
    monkeypatch.setattr(status, "ANSWER_S", 4.0)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        begin = time.monotonic()
        with pytest.raises(ValueError, match=f"what listens at {address} has not answered"):
            status.cluster_status(address)
        assert time.monotonic() - begin < 40


def test_clusters_on_this_machine_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    with raylet("127.0.0.1:7"), raylet("127.0.0.1:9"):
        with pytest.raises(ValueError, match="Ray clusters of yours run here") as said:
            status.cluster_status("auto")
        assert all(part in str(said.value) for part in (":7", ":9", "give --address"))
        monkeypatch.setattr("os.getuid", lambda: 12345)
        with pytest.raises(ValueError, match="you run no Ray cluster") as said:
            status.cluster_status("auto")
        assert "others have theirs at" in str(said.value) and "127.0.0.1:7 of " in str(said.value)
