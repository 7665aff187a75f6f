"""Starts Ray on this machine, and sets the environment variables that its processes read.

Ray reads them when it is first imported, so this module imports Ray late.
"""

import logging
import os
import secrets
import signal
from collections.abc import Mapping, Set
from contextlib import suppress
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any, Final

from diffray.workers.process import children

log = logging.getLogger(__name__)

SETTINGS: Final = {
    "RAY_worker_niceness": "0",  # Ray's default is 15, which starves ranks next to other work
    "RAY_AUTH_MODE": "token",  # so that no other user or machine can run code here
    "RAY_USAGE_STATS_ENABLED": "0",
}
# A single machine: all of Ray's own ports are on 127.0.0.1.
ALONE: Final = {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}


def set_defaults(settings: Mapping[str, str]) -> None:
    """Set the variables that the user has not set."""
    for name, value in settings.items():
        os.environ.setdefault(name, value)


def start_ray_here(**options: Any) -> Any:
    """Start Ray on this machine, with a token that only this user can read; return its context."""
    import ray

    _make_token()
    before = children()
    try:
        return ray.init(address="local", **options)
    except Exception as error:  # Ray has no type for it
        if "timed out during startup" not in str(error):
            raise
        log.warning("Ray was not up within its own limit of 30 s; starting it once more")
        kill_rays_since(before)
        return ray.init(address="local", **options)


def kill_rays_since(before: Set[int]) -> None:
    """Kill what a failed start of Ray has left: children that were not there before."""
    import ray

    package = str(Path(ray.__file__).parent).encode()
    for pid in children() - before:
        with suppress(OSError):
            if package in Path(f"/proc/{pid}/cmdline").read_bytes():
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)


def _make_token() -> None:
    """Create Ray's token unless the user has one: Ray would let other users read it."""
    given = {"RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"} & os.environ.keys()
    if given or os.environ.get("RAY_AUTH_MODE") != "token":
        return
    folder = Path.home() / ".ray"
    folder.mkdir(exist_ok=True)
    token = folder / "auth_token"
    with NamedTemporaryFile("w", dir=folder) as file, suppress(FileExistsError):
        file.write(secrets.token_hex(32))
        file.flush()
        os.link(file.name, token)  # complete, whatever another server does at the same time
    token.chmod(0o600)  # perhaps it is from an earlier Ray
