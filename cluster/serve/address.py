"""Where `diffray serve` listens, and which Ray clusters run on this machine."""

import contextlib
import errno
import socket
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from pydantic import Field

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
