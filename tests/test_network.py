"""A gang over two nodes whose network is cut: silently, as a switch does it, for a while."""

import asyncio
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import ray
from ray.cluster_utils import Cluster

from diffray.cluster.config import EngineConfig
from diffray.cluster.remote import RemoteEngine
from tests.local_ray import MEMORY, ray_environment
from tests.test_gang import LONG, answer, in_process, prompts, under_way, wish

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        os.geteuid() != 0 or shutil.which("ip") is None, reason="needs root and the command ip"
    ),
]

HERE, THERE = "10.213.7.1", "10.213.7.2"
NOBODY = "02:00:00:00:00:01"  # an Ethernet address that no card has
HANG_S = 5.0


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)


class Cable:
    """Two ends of a virtual cable, the far one in a network namespace of its own."""

    def __init__(self, name: str) -> None:
        self.name, self.near, self.far = name, f"{name}0", f"{name}1"

    def __enter__(self) -> "Cable":
        ip("netns", "add", self.name)
        ip("link", "add", self.near, "type", "veth", "peer", "name", self.far)
        ip("link", "set", self.far, "netns", self.name)
        ip("addr", "add", f"{HERE}/24", "dev", self.near)
        ip("-n", self.name, "addr", "add", f"{THERE}/24", "dev", self.far)
        ip("link", "set", self.near, "up")
        for device in ("lo", self.far):
            ip("-n", self.name, "link", "set", device, "up")
        return self

    def __exit__(self, *_: object) -> None:
        ip("link", "del", self.near)
        ip("netns", "del", self.name)

    def cut(self) -> None:
        """Let everything that is sent from now on arrive nowhere; nobody is told."""
        for at, other, device in self._ends():
            ip(*at, "neigh", "replace", other, "lladdr", NOBODY, "dev", device, "nud", "permanent")

    def mend(self) -> None:
        for at, other, device in self._ends():
            ip(*at, "neigh", "del", other, "dev", device)

    def _ends(self) -> list[tuple[tuple[str, ...], str, str]]:
        return [((), THERE, self.near), (("-n", self.name), HERE, self.far)]


@contextmanager
def far_node(cable: Cable, address: str) -> Iterator[None]:
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


@pytest.fixture(scope="module")
def cable() -> Iterator[Cable]:
    """Start a cluster of two nodes, with room for one rank on each."""
    with Cable(f"df{os.getpid() % 10_000}") as found, ray_environment({}):
        cluster = Cluster()
        try:
            cluster.add_node(
                node_ip_address=HERE,
                num_cpus=2,
                include_dashboard=False,
                object_store_memory=MEMORY,
            )
            ray.init(address=cluster.address, _node_ip_address=HERE)
            with far_node(found, cluster.address):
                while ray.cluster_resources().get("CPU", 0) < 3:
                    time.sleep(0.2)
                yield found
        finally:
            ray.shutdown()
            cluster.shutdown()


@pytest.mark.parametrize(("seconds", "restarts"), [(1.5, 0), (10.0, 1)])
def test_a_cut_costs_a_pause_and_no_token(cable: Cable, seconds: float, restarts: int) -> None:
    asked, params = prompts("demo", 3), wish(LONG)
    expected = in_process("demo", asked, [params] * 3)
    config = EngineConfig(
        tensor_parallel_size=2, dtype="float64", cpu_threads=1, round_timeout_s=HANG_S
    )

    async def run() -> tuple[Any, int, float]:
        running = await RemoteEngine.start("demo", config, [{"CPU": 1}] * 3)
        try:
            tasks = [
                asyncio.create_task(answer(running, uid, prompt, params))
                for uid, prompt in enumerate(asked)
            ]
            await under_way(running)
            cable.cut()
            await asyncio.sleep(seconds)
            cable.mend()
            mended = time.monotonic()
            answers = await asyncio.gather(*tasks)
            return answers, (await running.load()).restarts, time.monotonic() - mended
        finally:
            await running.close()

    answers, counted, took = asyncio.run(run())
    print(f"cut for {seconds:g} s: all answers {took:.1f} s after the end of it")
    assert [a.ids for a in answers] == [a.ids for a in expected]
    assert counted >= restarts and (restarts or counted == 0)
