"""Two nodes of Ray on this machine, the second behind a cable that can be cut; needs root and `ip`.

The second node is in a network namespace of its own. Cutting makes each end send to an Ethernet
address that nobody has: what is sent arrives nowhere and nobody is told, as when a switch dies.
"""

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import ray
from ray.cluster_utils import Cluster

from tools.local_ray import MEMORY, OPTIONS, ray_environment

HERE, THERE = "10.213.7.1", "10.213.7.2"
_JOINED_S = 120.0
_NOBODY = "02:00:00:00:00:01"  # an Ethernet address that no card has


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)


class Cable:
    """Two ends of a virtual cable, the far one in a network namespace of its own."""

    def __init__(self, name: str) -> None:
        self.name, self.near, self.far = name, f"{name}0", f"{name}1"

    def __enter__(self) -> "Cable":
        _ip("netns", "add", self.name)
        _ip("link", "add", self.near, "type", "veth", "peer", "name", self.far)
        _ip("link", "set", self.far, "netns", self.name)
        _ip("addr", "add", f"{HERE}/24", "dev", self.near)
        _ip("-n", self.name, "addr", "add", f"{THERE}/24", "dev", self.far)
        _ip("link", "set", self.near, "up")
        for device in ("lo", self.far):
            _ip("-n", self.name, "link", "set", device, "up")
        return self

    def __exit__(self, *_: object) -> None:
        _ip("link", "del", self.near)
        _ip("netns", "del", self.name)

    def cut(self) -> None:
        """Drop everything that is sent from now on, without an error."""
        for at, other, device in self._ends():
            _ip(
                *at, "neigh", "replace", other, "lladdr", _NOBODY, "dev", device, "nud", "permanent"
            )

    def mend(self) -> None:
        for at, other, device in self._ends():
            _ip(*at, "neigh", "del", other, "dev", device)

    def _ends(self) -> list[tuple[tuple[str, ...], str, str]]:
        return [((), THERE, self.near), (("-n", self.name), HERE, self.far)]


@contextmanager
def two_nodes() -> Iterator[Cable]:
    """Start a cluster with room for a coordinator and a rank here, and for a rank there."""
    with Cable(f"df{os.getpid() % 10_000}") as cable, ray_environment({}):
        cluster = Cluster()
        try:
            cluster.add_node(node_ip_address=HERE, num_cpus=2, **OPTIONS)
            ray.init(address=cluster.address, _node_ip_address=HERE)
            with _far_node(cable, cluster.address):
                _wait_for_cores(3)
                yield cable
        finally:
            ray.shutdown()
            cluster.shutdown()


def _wait_for_cores(count: int) -> None:
    """Ray does not announce that a node has joined: it has to be polled."""
    end = time.monotonic() + _JOINED_S
    while ray.cluster_resources().get("CPU", 0) < count:
        if time.monotonic() > end:
            raise TimeoutError(f"the far node has not joined within {_JOINED_S:g} s")
        time.sleep(0.2)


@contextmanager
def _far_node(cable: Cable, address: str) -> Iterator[None]:
    """Start a node of the cluster at the far end."""
    ray_command = str(Path(sys.executable).parent / "ray")
    words = [ray_command, "start", f"--address={address}", f"--node-ip-address={THERE}"]
    words += ["--num-cpus=1", f"--object-store-memory={MEMORY}", "--block"]
    process = subprocess.Popen(["ip", "netns", "exec", cable.name, *words])
    try:
        yield
    finally:
        process.terminate()
        process.wait(60)
