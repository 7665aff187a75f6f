"""Sets the environment variables that Ray reads on import, and hides those with API keys."""

import ctypes
import os
import sys
from collections.abc import Collection, Iterable
from pathlib import Path

from diffray.cluster.control.ray_settings import ALONE, set_defaults
from diffray.cluster.control.ray_settings import SETTINGS as RAY
from diffray.cluster.serve.address import is_alone

API_KEY = "DIFFRAY_API_KEY"  # the variable with API keys, in addition to the command line
OPERATOR_KEY = "DIFFRAY_OPERATOR_KEY"  # the same for operators' keys
ROUTES = "DIFFRAY_ROUTES"  # the paths of this server's models, separated by spaces
PREFIX_ROUTED = "DIFFRAY_PREFIX_ROUTED"  # names of the applications with prefix_routing

SETTINGS = RAY | {
    # Serve kills a replica that fails its health checks instead of waiting for it.
    "RAY_SERVE_FORCE_STOP_UNHEALTHY_REPLICAS": "1",
    # Handles lost replicas, and paths that are not ready (503).
    "RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH": "diffray.cluster.serve.ingress:middlewares",
    # A proxy is restarted after three failures: after 4.5 s instead of 30 s.
    "RAY_SERVE_PROXY_HEALTH_CHECK_PERIOD_S": "1.5",
    "RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S": "20",  # a busy machine needs more than 5
}
# Proxies call replicas over gRPC, which takes less time than calls of actors. Not on several nodes:
# that a node has vanished gRPC notices only after minutes.
_GRPC = {
    "RAY_SERVE_PROXY_USE_GRPC": "1",
    # A whole answer is one message, and by default one of more than 4 MiB fails.
    "RAY_SERVE_REPLICA_GRPC_MAX_MESSAGE_LENGTH": str(2**28),
    "grpc_proxy": "",  # instead of `http_proxy`
}


def prepare(address: str) -> None:
    """Set variables for joining a cluster, unless the user has; call it before importing ray."""
    set_defaults(SETTINGS | (ALONE if is_alone(address) else {}) | _colours())


def prepare_server(routes: Collection[str], prefix_routed: Collection[str]) -> None:
    """Set the variables for starting Ray here, with models at these paths.

    `prefix_routed` are the applications with prefix_routing.
    """
    own = {ROUTES: " ".join(routes), PREFIX_ROUTED: " ".join(prefix_routed)}
    quiet = {"RAY_SERVE_LOG_TO_STDERR": "0"}  # to its files, not to the terminal
    set_defaults(SETTINGS | ALONE | _GRPC | own | quiet | _colours())


def _colours() -> dict[str, str]:
    """Return what keeps Ray from colouring its processes' lines where they go to a file."""
    to_terminal = sys.stdout.isatty() and sys.stderr.isatty()
    return {} if to_terminal else {"RAY_COLOR_PREFIX": "0"}


def take_keys(typed: Iterable[str], variable: str) -> list[str]:
    """Return the keys from the command line and an environment variable, and hide them.

    Ray passes the environment to all its processes and shows the arguments as a job's entrypoint.
    `ps` shows both as they were at startup, so they are overwritten in place.
    """
    keys = [*dict.fromkeys((*typed, *os.environ.pop(variable, "").split()))]
    secret = {key.encode() for key in keys}
    bounds = Path("/proc/self/stat").read_text().rpartition(")")[2].split()[45:49]
    arguments, after, environment, end = map(int, bounds)
    for start, stop in ((arguments, after), (environment, end)):
        words = ctypes.string_at(start, stop - start).split(b"\0")
        hidden = b"\0".join(_hidden(word, secret, variable) for word in words)
        ctypes.memmove(start, hidden, stop - start)
    return keys


def _hidden(word: bytes, secret: Collection[bytes], variable: str) -> bytes:
    """Return a word of the command line or the environment with its key masked."""
    name, equals, value = word.partition(b"=")
    if word in secret:
        return b"*" * len(word)
    if name == variable.encode() or (name.startswith(b"--") and value in secret):
        return name + equals + b"*" * len(value)
    return word
