"""How soon a loss is found, and an answer goes on: `python -m tools.chaos.detection`.

One stream at a time, over an engine on a cluster of two nodes on this machine; the last rank has a
node to itself. "Found" is when the count of restarts rises, which the endpoint shows in its
metrics; "goes on" when the client is sent the next token. What hangs is found when `--hang` seconds
are over, and a node that is lost is replaced as soon as that is found.
"""

import argparse
import asyncio
import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import ray
from ray.cluster_utils import Cluster

from diffray.cluster.cli.bench import percentile
from diffray.cluster.control.engine_config import EngineConfig
from diffray.cluster.control.remote import RemoteEngine
from diffray.components.params import SamplingParams
from diffray.workers.admission import check_request
from diffray.workers.messages import Request
from tools.local_ray import OPTIONS, ray_environment

FAULTS = ("kill rank", "kill coordinator", "lose node", "hang rank", "hang coordinator")
PROMPT = (11, 12, 13)
LONG: Any = {
    "max_tokens": 512,
    "ignore_eos": True,
    "diffusion": {"block_length": 32, "decoder": {"kind": "fixed", "steps": 512}},
}
_LOOK_S = 0.01
_WELL_S = 120.0  # for an answer to go on


class Nodes:
    """A head, and a node with room for one rank, which may be lost."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._far: Any = None

    def add(self) -> None:
        self._far = self._cluster.add_node(num_cpus=1, **OPTIONS)

    def lose(self) -> None:
        """Kill the node's processes at once."""
        self._cluster.remove_node(self._far, allow_graceful=False)


@contextmanager
def two_nodes(ranks: int) -> Iterator[Nodes]:
    """Start a head with room for the coordinator and all ranks but one, and a node for that."""
    with ray_environment({}):
        cluster = Cluster()
        try:
            cluster.add_node(num_cpus=ranks, **OPTIONS)
            ray.init(address=cluster.address, log_to_driver=False)
            nodes = Nodes(cluster)
            nodes.add()
            yield nodes
        finally:
            ray.shutdown()
            cluster.shutdown()


class Stream:
    """A client of one long answer, and when it received something."""

    def __init__(self) -> None:
        self.heard: list[float] = []

    async def run(self, engine: RemoteEngine, uid: int) -> None:
        async for _ in engine.submit(
            check_request(Request(uid, PROMPT, SamplingParams(**LONG)), engine.limits)
        ):
            self.heard.append(time.monotonic())

    async def after(self, moment: float) -> float:
        """Wait for the first news after a moment."""
        async with asyncio.timeout(_WELL_S):
            while not self.heard or self.heard[-1] <= moment:
                await asyncio.sleep(_LOOK_S)
        return next(at for at in self.heard if at > moment)


async def restarts(engine: RemoteEngine, fault: str) -> int:
    if fault.endswith("coordinator"):
        return engine.restarts
    return (await engine.load()).restarts


async def hit(engine: RemoteEngine, nodes: Nodes, fault: str) -> None:
    if fault == "lose node":
        await asyncio.to_thread(nodes.lose)
        return
    of_rank = fault.endswith("rank")
    pid = (await engine.pids())[-1 if of_rank else 0]
    os.kill(pid, signal.SIGKILL if fault.startswith("kill") else signal.SIGSTOP)


async def measured(engine: RemoteEngine, nodes: Nodes, fault: str) -> tuple[float, float]:
    """Return the seconds until a fault was found, and until the answer went on."""
    stream = Stream()
    task = asyncio.create_task(stream.run(engine, uid=time.monotonic_ns()))
    try:
        await stream.after(0.0)
        before = await restarts(engine, fault)
        begin = time.monotonic()
        await hit(engine, nodes, fault)
        while await restarts(engine, fault) == before:
            await asyncio.sleep(_LOOK_S)
        found = time.monotonic()
        if fault == "lose node":
            nodes.add()
        return found - begin, await stream.after(found) - begin
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def run(ranks: int, times: int, hang_s: float, faults: list[str]) -> None:
    """Print a line for each kind of fault."""
    config = EngineConfig(
        tensor_parallel_size=ranks,
        device="cpu",
        cpu_threads=1,
        heartbeat_timeout_s=hang_s,
        max_restarts=1000,
    )
    with two_nodes(ranks) as nodes:
        engine = await RemoteEngine.start("demo", config, [{"CPU": 1}] * (ranks + 1))
        try:
            for fault in faults:
                seen = [await measured(engine, nodes, fault) for _ in range(times)]
                found, well = (
                    f"{percentile(each, 50):.2f} s (longest {max(each):.2f})"
                    for each in zip(*seen, strict=True)
                )
                print(f"{fault}: found after {found}, goes on after {well}", flush=True)
        finally:
            await engine.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--times", type=int, default=5, help="that each fault happens")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--hang", type=float, default=4.0, help="heartbeat_timeout_s of the engine")
    parser.add_argument("--faults", nargs="+", choices=FAULTS, default=list(FAULTS))
    given = parser.parse_args()
    asyncio.run(run(given.ranks, given.times, given.hang, given.faults))


if __name__ == "__main__":
    main()
