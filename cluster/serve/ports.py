"""Reserves a block of ports that no other server on this machine uses.

Ray and Ray Serve use some fixed ports, which all servers on a machine would share. The blocks are
above Ray's worker ports (up to 19999), below Kubernetes' node ports (from 30000), and below the
range that the kernel assigns by itself (ip_local_port_range, from 32768).
"""

import atexit
import random
import socket
from pathlib import Path

FIRST, STOP = 20_000, 30_000
BLOCK = 256  # ports of one server: a few for itself, the others for replicas
REPLICAS = 8  # offset of the replicas' ports
GRPC = 240  # and of their gRPC ports, which diffray does not enable


def port_settings() -> dict[str, str]:
    """Claim a block for the life of this process, and assign its ports."""
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
    """Return the first port of a block that is claimed for the life of this process.

    The claim is the first port, bound but not listened on: the kernel gives it to one process only
    and frees it when that ends. If processes of a dead server still listen in the block, it is
    skipped.
    """
    starts = list(range(FIRST, STOP - BLOCK + 1, BLOCK))
    random.shuffle(starts)
    ephemeral = ephemeral_ports()  # the blocks to take last
    starts.sort(key=lambda start: start in ephemeral or start + BLOCK - 1 in ephemeral)
    for first in starts:
        claim = socket.socket()
        try:
            claim.bind(("", first))
            for port in range(first + 1, first + BLOCK):
                with socket.socket() as probe:
                    probe.bind(("", port))
        except OSError:
            claim.close()
            continue
        atexit.register(claim.close)
        return first
    raise ValueError(
        f"there are no {BLOCK} free ports in a row between {FIRST} and {STOP}; "
        "end other servers on this machine"
    )


def ephemeral_ports() -> range:
    """Return the range of ports that the kernel assigns by itself."""
    try:
        low, high = Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()
    except OSError:  # not Linux
        return range(0)
    return range(int(low), int(high) + 1)
