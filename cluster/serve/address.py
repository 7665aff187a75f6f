"""The address of `diffray serve`, reserved against other servers."""

import contextlib
import errno
import socket
from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Server:
    """The address to listen on, and the Ray cluster to use."""

    host: str = "127.0.0.1"
    port: int = 8000
    address: str | None = None  # of a running Ray cluster
    dashboard: bool = False


@contextlib.contextmanager
def reserved(server: Server) -> Iterator[None]:
    """Reserve an address before Ray starts; raise ValueError if it is taken.

    Without that, two servers that start at once both find it free, and Ray's proxies share ports.
    """
    if server.address is not None:
        yield  # the cluster's Serve may already listen there
        return
    with socket.socket(socket.AF_UNIX) as name:
        try:
            name.bind(f"\0diffray serve {server.host} {server.port}")
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise
            raise ValueError(in_use(server)) from None
        check_free(server)
        yield


def in_use(server: Server) -> str:
    return f"port {server.port} is in use; give another --port"


def check_free(server: Server) -> None:
    """Raise if an address is not available."""
    if not 0 < server.port < 2**16:
        raise ValueError(f"there is no port {server.port}; give one from 1 to {2**16 - 1}")
    family = socket.AF_INET6 if ":" in server.host else socket.AF_INET
    try:
        socket.create_server((server.host, server.port), family=family).close()
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            reason = in_use(server)
        else:
            reason = f"nothing can listen on {server.host}:{server.port} ({error.strerror})"
        raise ValueError(reason) from None
