"""A Ray of our own: its token, and what its processes report on the server's terminal."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import ray
from ray._private import worker

from diffray.cluster.control.ray_settings import start_ray_here
from diffray.cluster.serve import ray_session

DEATH = (
    "A worker died or was killed while executing a task by an unexpected system error. Worker ID: "
    "a1 Node ID: {node} Worker IP address: 127.0.0.1 Worker port: 4 Worker PID: {pid} Worker exit "
    "type: SYSTEM_ERROR"
)
ACTORS = {
    str(pid): {"ActorClassName": name, "Pid": pid, "Address": {"NodeID": "here"}}
    for pid, name in ((1, "Worker"), (2, "Coordinator"), (3, "ServeReplica:demo:Replica"))
}


@pytest.mark.parametrize(
    ("text", "said", "printed"),
    [
        ("diffray: demo: rank 0 died; 2 requests continue", True, False),
        (DEATH.format(node="here", pid=1), False, False),
        (DEATH.format(node="here", pid=2), False, False),
        (DEATH.format(node="here", pid=3), False, True),
        (DEATH.format(node="there", pid=1), False, True),
        ("1 Workers killed due to memory pressure", False, True),
    ],
)
def test_only_deaths_that_diffray_announces_are_left_out(
    text: str, said: bool, printed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours: list[str] = []
    rays: list[Any] = []
    monkeypatch.setattr(ray_session, "actors", lambda: ACTORS)
    monkeypatch.setattr(worker, "print_to_stdstream", lambda data, ignore_prefix: rays.append(data))
    report = {"lines": [text], "pid": "raylet", "is_err": False}
    with ray_session.reports_printed(ours.append):
        worker.print_to_stdstream(report, ignore_prefix=False)
    assert ours == [text] * said and rays == [report] * printed


def test_a_ray_that_was_too_slow_is_started_once_more_without_the_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    script = tmp_path / "ray/raylet.py"
    script.parent.mkdir()
    script.write_text("import time; time.sleep(300)")
    parts: list[subprocess.Popen[bytes]] = []

    def init(**options: Any) -> None:
        parts.append(subprocess.Popen([sys.executable, script]))
        if len(parts) == 1:
            parts.append(subprocess.Popen(["sleep", "300"]))
            raise Exception("The current node timed out during startup. This could happen because")

    monkeypatch.setattr(ray, "init", init)
    monkeypatch.setattr(ray, "__file__", str(tmp_path / "ray/__init__.py"))
    try:
        start_ray_here()
        assert [part.poll() is None for part in parts] == [False, True, True]
        assert [record.message[:19] for record in caplog.records] == ["Ray was not up with"]
    finally:
        for part in parts:
            part.kill()
            part.wait()


def test_the_token_is_private_beforehand(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """When Ray runs, others could use a token that they can read."""
    token = tmp_path / ".ray/auth_token"
    token.parent.mkdir()
    token.write_text("written by an earlier Ray")
    token.chmod(0o644)
    monkeypatch.setenv("HOME", str(tmp_path))
    modes: list[int] = []

    def init(**options: Any) -> None:
        modes.append(token.stat().st_mode & 0o777)
        raise Exception("no room in /dev/shm")

    monkeypatch.setattr(ray, "init", init)
    with pytest.raises(Exception, match="no room"):
        start_ray_here()
    assert modes == [0o600]
