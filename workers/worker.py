"""The Ray actor around one rank: it joins its mesh, loads its shard and serves rounds.

Only the methods import torch, in the actor's process; the process that creates workers does not.
"""

import fcntl
import os
import socket
import struct
import sys
from typing import TYPE_CHECKING, Any

import ray

from diffray.workers.link import Link
from diffray.workers.messages import ControlAddress, RankPlace, RankSetup
from diffray.workers.process import own_process

if TYPE_CHECKING:
    from diffray.workers.limits import Limits


@ray.remote
class Worker:
    """One rank of a worker group; call `place` on all ranks, then `start`, then `run`."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size
        self.link: Link | None = None
        self.store: Any = None
        self.mesh: Any = None
        self.engine: Any = None

    def place(
        self, coordinator: ControlAddress, heartbeat_s: float, load_timeout_s: float
    ) -> RankPlace:
        """Connect to the coordinator; return where this rank runs and how to reach rank 0."""
        self.link = Link.connect(*coordinator, self.rank)
        self.link.keep_alive(heartbeat_s)
        node = ray.get_runtime_context().get_node_id()
        host = ray.util.get_node_ip_address()
        if (name := interface_of(host)) is not None:
            # Otherwise gloo listens on the host name's address, often the loopback.
            os.environ.setdefault("GLOO_SOCKET_IFNAME", name)
        port = 0
        if self.size > 1:
            # Only rank 0 needs it, but this way all ranks import torch in parallel.
            from diffray.components.mesh import open_store

            if self.rank == 0:
                self.store = open_store(host, timeout=load_timeout_s)
                port = self.store.port
        return RankPlace(own_process(node), host, port)

    def start(self, setup: RankSetup, host: str, port: int) -> "Limits":
        """Join the mesh and load this rank's shard; return engine limits for the API server."""
        from diffray.components.backend import choose_device, use_threads
        from diffray.components.mesh import Mesh, join_store
        from diffray.workers.bring_up.start import bring_up
        from diffray.workers.setup import build_rank

        model, options = setup.model, setup.options
        device = choose_device(options.device)
        if device.type == "cpu":
            use_threads(options.cpu_threads)
        self.mesh = Mesh(device=device)
        if self.size > 1:
            store = self.store or join_store(host, port, timeout=setup.load_timeout_s)
            self.mesh = Mesh.connect(
                store,
                self.rank,
                self.size,
                device=device,
                timeout=setup.collective_timeout_s,
                expert_parallel=setup.expert_parallel,
            )
        findings = bring_up(model, options, self.mesh, say=self._say)
        self.engine = build_rank(model, options, self.mesh, findings)
        limits: Limits = self.engine.limits
        return limits

    def _say(self, line: str) -> None:
        """Write a line to this rank's log and to the terminals of the cluster's drivers."""
        assert self.link is not None, "place() comes first"
        print(line, file=sys.stderr, flush=True)
        self.link.send([line])

    def run(self) -> None:
        """Serve rounds until the coordinator ends them."""
        from diffray.workers.rank import Rank

        assert self.link is not None, "place() comes first"
        Rank(self.engine, self.mesh, self.link).serve()
        self.mesh.leave()


def interface_of(host: str) -> str | None:
    """Return the network interface with this IPv4 address, if any."""
    get_address = 0x8915  # SIOCGIFADDR
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            try:
                found = fcntl.ioctl(probe, get_address, struct.pack("256s", name.encode()))
            except OSError:
                continue  # it has none
            if socket.inet_ntoa(found[20:24]) == host:
                return name
    return None
