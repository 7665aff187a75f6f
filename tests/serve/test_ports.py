"""Each server on a machine has ports of its own, also when several are started at once."""

import random
import socket
import subprocess
import sys
from contextlib import ExitStack
from typing import Any

import pytest

from benchmarks.serve_process import free_port
from diffray.cluster.serve import ports

# All begin with the same block, so that it is not chance that parts them.
CLAIM = """
import random, sys
from diffray.cluster.serve.address import Server, reserved
from diffray.cluster.serve.ports import claim_block
random.shuffle = list
sys.stdin.readline()
print(claim_block(), flush=True)
try:
    with reserved(Server(port=int(sys.argv[1]))):
        print("claimed", flush=True)
        sys.stdin.readline()
except ValueError as error:
    print(error, flush=True)
sys.stdin.readline()
"""


def test_servers_that_start_at_once_share_no_port() -> None:
    command = [sys.executable, "-c", CLAIM, str(free_port())]
    with ExitStack() as stack:
        pipes: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        servers: list[Any] = [subprocess.Popen(command, **pipes) for _ in range(4)]
        for server in servers:
            stack.callback(server.wait)
            stack.callback(server.kill)
        for server in servers:
            server.stdin.write("go\n")
            server.stdin.flush()
        blocks, claims = ([each.stdout.readline().strip() for each in servers] for _ in range(2))
    assert len(set(blocks)) == len(servers), blocks
    assert claims.count("claimed") == 1 and sum("in use" in claim for claim in claims) == 3


def test_a_block_in_which_somebody_listens_is_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(random, "shuffle", list)
    free = ports.claim_block()
    with socket.create_server(("127.0.0.1", free + ports.BLOCK + 99)):
        assert ports.claim_block() not in (free, free + ports.BLOCK)


def test_the_kernel_and_ray_assign_none_of_the_ports() -> None:
    """Neither by the kernel, nor twice by ourselves, and Serve knows all of their names."""
    from ray.serve._private import constants

    settings = ports.port_settings()
    found = {name: int(port) for name, port in settings.items()}
    assert not {name for name in found if name.startswith("RAY_SERVE")} - set(vars(constants))
    assert not set(found.values()) & set(ports.ephemeral_ports())
    low, high = "RAY_SERVE_DIRECT_INGRESS_MIN_{}_PORT", "RAY_SERVE_DIRECT_INGRESS_MAX_{}_PORT"
    replicas, grpc = (
        range(found.pop(low.format(kind)), found.pop(high.format(kind)))
        for kind in ("HTTP", "GRPC")
    )
    every = [*found.values(), *replicas, *grpc]
    assert len(every) == len(set(every)) and len(replicas) > 200
