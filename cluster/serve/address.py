"""Where `diffray serve` listens, which Ray clusters run here, and what Ray reads on import.

Of the environment, the variables with API keys are hidden from other processes.
"""

import contextlib
import ctypes
import errno
import os
import socket
import sys
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from pydantic import Field

from diffray.cluster.control.ray_settings import ALONE, set_defaults
from diffray.cluster.control.ray_settings import SETTINGS as RAY
from diffray.components.config import Config

EVERYWHERE: Final = ("0.0.0.0", "::")
LOOPBACK: Final = "127.0.0.1:"


class Server(Config):
    """Where `diffray serve` listens, and which Ray it uses."""

    host: str = Field("127.0.0.1", description="The address to listen on.")
    port: int = Field(8000, description="The port to listen on.")
    address: str | None = Field(
        None,
        description="Join the Ray cluster at HOST:PORT (or auto) instead of starting one.",
    )
    dashboard: bool = Field(False, description="Start Ray's dashboard.")


@contextlib.contextmanager
def reserved(server: Server) -> Iterator[None]:
    """Reserve an address before Ray starts; raise ValueError if it is taken.

    Otherwise two servers that start together both find it free, and their proxies share the port.
    """
    if server.address is not None:
        yield  # the cluster's Serve may already listen there
        return
    with socket.socket(socket.AF_UNIX) as name:
        try:
            name.bind(f"\0diffray serve {server.host} {server.port}")
        except OSError as error:
            raise _unavailable(server, error) from None
        check_free(server)
        yield


def joined(server: Server, host: str | None, port: int) -> Server:
    """Return where a running Serve listens; refuse other addresses, which Ray would ignore."""
    if host is None:
        raise ValueError("the cluster's Serve has no HTTP proxy; start it with one")
    listens: dict[str, Any] = {"host": host, "port": port}
    for name, value in listens.items():
        if name in server.model_fields_set and getattr(server, name) != value:
            raise ValueError(
                f"the cluster's Serve listens on {name} {value} already; give --{name} {value}, "
                "or leave it out"
            )
    return server.model_copy(update=listens)


def reachable_url(serve_details: Mapping[str, Any], here: str) -> str | None:
    """Return a URL that reaches Serve; None if it has no HTTP proxy.

    If Serve listens on all addresses, use a node with a proxy, preferably this one (`here`).
    """
    options = serve_details.get("http_options") or {}
    host, port = options.get("host"), options.get("port")
    if not host or not port:
        return None
    if host in EVERYWHERE:
        proxies = serve_details.get("proxies") or {}
        proxy: dict[str, Any] = proxies.get(here) or next(iter(proxies.values()), {})
        host = proxy.get("node_ip") or "127.0.0.1"
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def check_free(server: Server) -> None:
    """Raise ValueError if an address is not available."""
    if not 0 < server.port < 2**16:
        raise ValueError(f"there is no port {server.port}; give one from 1 to {2**16 - 1}")
    family = socket.AF_INET6 if ":" in server.host else socket.AF_INET
    try:
        socket.create_server((server.host, server.port), family=family).close()
    except OSError as error:
        raise _unavailable(server, error) from None


def _unavailable(server: Server, error: OSError) -> ValueError:
    if error.errno == errno.EADDRINUSE:
        return ValueError(f"port {server.port} is in use; give another --port")
    return ValueError(f"cannot listen on {server.host}:{server.port} ({error.strerror})")


def clusters() -> Iterator[tuple[str, int]]:
    """Yield the address of each Ray cluster with a node here, and the user that runs the node."""
    for process in Path("/proc").glob("[0-9]*"):
        try:
            words = (process / "cmdline").read_bytes().decode(errors="replace").split("\0")
            user = process.stat().st_uid
        except OSError:  # it has ended, or belongs to another user
            continue
        if Path(words[0]).name == "raylet":
            for word in words:
                if word.startswith("--gcs-address="):
                    yield word.partition("=")[2], user


def is_alone(address: str) -> bool:
    """Return whether this is the Ray of a local `diffray serve`, which is on 127.0.0.1 only."""
    address = address.replace("localhost:", LOOPBACK)
    return address.startswith(LOOPBACK) and address in dict(clusters())


API_KEY = "DIFFRAY_API_KEY"  # the variable with API keys, in addition to the command line
OPERATOR_KEY = "DIFFRAY_OPERATOR_KEY"  # the same for operators' keys
ROUTES = "DIFFRAY_ROUTES"  # the paths of this server's models, separated by spaces
PREFIX_ROUTED = "DIFFRAY_PREFIX_ROUTED"  # names of the applications with prefix_routing

SETTINGS = RAY | {
    # Serve kills a replica that fails its health checks instead of waiting for it.
    "RAY_SERVE_FORCE_STOP_UNHEALTHY_REPLICAS": "1",
    # Handles lost replicas, and paths that are not ready (503).
    "RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH": "diffray.cluster.serve.proxy:middlewares",
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
