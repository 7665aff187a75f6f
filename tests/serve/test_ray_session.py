"""A Ray of our own: its start, and its token."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import ray

from diffray.cluster.control.ray_settings import start_ray_here


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
    monkeypatch.setenv("RAY_AUTH_MODE", "token")
    modes: list[int] = []

    def init(**options: Any) -> None:
        modes.append(token.stat().st_mode & 0o777)
        raise Exception("no room in /dev/shm")

    monkeypatch.setattr(ray, "init", init)
    with pytest.raises(Exception, match="no room"):
        start_ray_here()
    assert modes == [0o600]
