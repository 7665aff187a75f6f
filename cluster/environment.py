"""What Ray reads from the environment when it is imported: always said, for its defaults vary."""

import os
import sys
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path

from diffray.cluster.haproxy import haproxy_settings
from diffray.cluster.ports import port_settings

API_KEY = "DIFFRAY_API_KEY"  # the variable that keys come from, if not from the command line
ROUTES = "DIFFRAY_ROUTES"  # the paths of this server's models, with spaces between

SETTINGS = {
    "RAY_worker_niceness": "0",  # Ray's own is 15, which starves ranks beside other work
    "RAY_AUTH_MODE": "token",  # nobody else on this machine or network may run code here
    "RAY_USAGE_STATS_ENABLED": "0",
# Serve kills a replica that fails its health checks, instead of waiting for its answers.
    "RAY_SERVE_FORCE_STOP_UNHEALTHY_REPLICAS": "1",
    # A lost replica, a path that leads nowhere yet, and requests that are not for this server.
    "RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH": "diffray.cluster.ingress:middlewares",
}
# This machine alone: all of Ray's own ports are on 127.0.0.1.
ALONE = {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}


def prepare() -> None:
    """Set what the user has not set; to be called before the first import of ray."""
    _set(SETTINGS)


def prepare_server(routes: Collection[str], *, haproxy: bool) -> None:
    """The same for a Ray of our own, with models at these paths."""
    _set(SETTINGS | ALONE | {ROUTES: " ".join(routes)} | port_settings())
    if haproxy:
        _set(haproxy_settings(routes))


def _set(settings: Mapping[str, str]) -> None:
    for name, value in settings.items():
        os.environ.setdefault(name, value)


def hide_keys(keys: Collection[str]) -> None:
    """Take API keys out of what others see of this process: its arguments and its environment.

    Ray hands the environment on to all its processes, and shows the arguments as a job's
    entrypoint.
    """
    os.environ.pop(API_KEY, None)
    from ray._raylet import setproctitle  # type: ignore[attr-defined]  # its stub has not all

    own = Path("/proc/self/cmdline")
    line = own.read_text(errors="replace").rstrip("\0") if own.exists() else "\0".join(sys.argv)
    words = ["*" * len(word) if word in keys else word for word in _parted(line.split("\0"))]
    setproctitle(" ".join(words))


def _parted(words: Iterable[str]) -> Iterator[str]:
    """Yield a command line's words, with --name=value as two."""
    for word in words:
        name, equals, value = word.partition("=")
        yield from (name, value) if equals and name.startswith("--") else (word,)
