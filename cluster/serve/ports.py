"""Ports of our own: a block that no other server on this machine uses, now or later.

Ray and Ray Serve have fixed ports for some of what they open, which all servers on a machine would
share. Below the range that the kernel gives out by itself (ip_local_port_range, from 32768), below
Kubernetes' node ports (from 30000), and above Ray's workers (up to 19999) nobody is in the way.
"""

import atexit
import random
import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

FIRST, STOP = 20_000, 30_000
BLOCK = 256  # ports of one server: a few for itself, the others for replicas
REPLICAS = 8  # where the ports of replicas begin in it
GRPC = 240  # and those of their gRPC, which diffray does not enable


def port_settings() -> dict[str, str]:
    """Claim a block for as long as this process lives, and say which port is whose."""
    first = claim_block()
    ports = {
        "RAY_SERVE_FALLBACK_PROXY_HTTP_PORT": first + 1,
        "RAY_SERVE_FALLBACK_PROXY_GRPC_PORT": first + 2,
        "RAY_SERVE_HAPROXY_METRICS_PORT": first + 3,
        "RAY_SERVE_HAPROXY_STATS_PORT": first + 4,
        "DASHBOARD_METRIC_PORT": first + 5,
        "AUTOSCALER_METRIC_PORT": first + 6,
        "RAY_SERVE_DIRECT_INGRESS_MIN_HTTP_PORT": first + REPLICAS,
        "RAY_SERVE_DIRECT_INGRESS_MAX_HTTP_PORT": first + GRPC,
        "RAY_SERVE_DIRECT_INGRESS_MIN_GRPC_PORT": first + GRPC,
        "RAY_SERVE_DIRECT_INGRESS_MAX_GRPC_PORT": first + BLOCK,
    }
    return {name: str(port) for name, port in ports.items()}


def claim_block() -> int:
    """Return the first port of a block that nobody else claims while this process lives.

    The claim is the first port, bound and never listened on: the kernel gives it to one process
    alone, and takes it back however that ends. Where a server's other processes have outlived it,
    they listen in the block, and it is passed over.
    """
    starts = list(range(FIRST, STOP - BLOCK + 1, BLOCK))
    random.shuffle(starts)
    given_out = ephemeral_ports()
    for first in sorted(starts, key=lambda start: _overlap(start, given_out)):
        with ExitStack() as claim:
            try:
                claim.enter_context(bound(first))
                for port in range(first + 1, first + BLOCK):
                    with bound(port):
                        pass
            except OSError:
                continue
            atexit.register(claim.pop_all().close)
            return first
    raise ValueError(
        f"there are no {BLOCK} free ports in a row between {FIRST} and {STOP}; "
        "end other servers on this machine"
    )


@contextmanager
def bound(port: int) -> Iterator[None]:
    """Hold a port on every address; raises OSError where somebody has it on any."""
    with socket.socket() as holder:
        holder.bind(("", port))
        yield


def ephemeral_ports() -> range:
    """Return the ports that the kernel gives to those who ask for any."""
    try:
        low, high = Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()
    except OSError:  # not Linux
        return range(0)
    return range(int(low), int(high) + 1)


def _overlap(first: int, ports: range) -> int:
    return max(0, min(first + BLOCK, ports.stop) - max(first, ports.start))
