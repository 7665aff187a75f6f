"""The ranks of one replica as Ray actors: started, driven and ended together."""

import asyncio
import logging
import secrets
import time
from collections.abc import Awaitable, Iterable
from typing import Any

import ray
from ray._private.state import actors
from ray.exceptions import ActorUnavailableError, RayActorError, RayError
from ray.util.placement_group import PlacementGroup
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from diffray.cluster.control.actor_names import actor_name
from diffray.cluster.control.engine_config import EngineConfig
from diffray.cluster.control.hub import Failure, Hub
from diffray.workers.messages import Reply, Round, WireRequest
from diffray.workers.process import Place, kill

log = logging.getLogger(__name__)

_DEATH_GRACE_S = 1.0  # after a rank's error, for Ray to tell of the death of another
_LOOK_S = 0.5  # between questions whether a rank that Ray could not reach is alive
_LOADING = 10  # times longer may ranks be silent that load: some of that holds Python's lock


class WorkersLost(Exception):
    """A rank died, hung or failed, and the worker group with it."""


class WorkerGroup:
    """One worker in each bundle after the first, and a control channel to all of them."""

    def __init__(self, model: str, config: EngineConfig, group: PlacementGroup) -> None:
        self.model, self.config, self.group = model, config, group
        self.size = config.tensor_parallel_size
        self.hub = Hub(self.size, secrets.token_bytes(32), _LOADING * config.heartbeat_timeout_s)
        self.facts: dict[str, Any] = {}  # what rank 0 tells of its engine
        self.places: list[Place] = []
        self.workers: list[Any] = []
        self._loops: list[asyncio.Task[Any]] = []
        self._placed = 0.0  # when all ranks had processes

    async def start(self) -> None:
        """Place the ranks, let them load and connect; raises WorkersLost where one fails."""
        begin = time.monotonic()
        host = ray.util.get_node_ip_address()
        port = await self.hub.listen(host)
        try:
            async with asyncio.timeout(self.config.load_timeout_s):
                await self._start(host, port)
        except RayError as error:
            raise WorkersLost(f"a rank could not start: {first_line(error)}") from error
        except TimeoutError:
            raise WorkersLost(
                f"the ranks were not ready within {self.config.load_timeout_s:g} s; "
                "raise load_timeout_s if the checkpoint is large or the disk slow"
            ) from None
        log.info(
            "%d ranks ready after %.1f s, with processes after %.1f s",
            self.size,
            time.monotonic() - begin,
            self._placed - begin,
        )

    async def _start(self, host: str, port: int) -> None:
        self.workers = [self._create(rank) for rank in range(self.size)]
        door = host, port, self.hub.secret
        wait = self.config.heartbeat_s, self.config.load_timeout_s
        self.places = await asyncio.gather(*(w.place.remote(door, *wait) for w in self.workers))
        await self.hub.complete.wait()
        self._placed = time.monotonic()
        nodes = [place["node"] for place in self.places]
        log.info("loading %s on %d ranks over %d nodes", self.model, self.size, len(set(nodes)))
        store = self.places[0]["host"], self.places[0]["port"]
        self.facts, *_ = await self._unless_hung(
            worker.start.remote(self.model, self._setup(), *store) for worker in self.workers
        )
        for rank, worker in enumerate(self.workers):
            self._loops.append(asyncio.create_task(self._watch(rank, worker.run.remote())))
        self.hub.expect_within(self.config.heartbeat_timeout_s)

    async def _unless_hung(self, calls: Iterable[Awaitable[Any]]) -> list[Any]:
        """Wait for a call of each rank; Ray tells of one that dies, the hub of one that hangs."""
        answers = asyncio.gather(*calls)
        while not answers.done():
            word = asyncio.create_task(self.next_failure())
            both: list[asyncio.Future[Any]] = [answers, word]
            await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
            word.cancel()
            if word.done() and isinstance(failure := word.result(), Failure):
                answers.cancel()
                raise WorkersLost(failure.error)
        return await answers

    def _setup(self) -> dict[str, Any]:
        """Return what a rank needs to know besides the model, as plain values."""
        config = self.config
        return {
            "engine": config.setup(),
            "expert_parallel": config.expert_parallel,
            "collective_timeout_s": config.round_timeout_s,
            "load_timeout_s": config.load_timeout_s,
        }

    def _create(self, rank: int) -> Any:
        from diffray.workers.worker import Worker  # imports torch, in the workers alone

        bundle = self.group.bundle_specs[rank + 1]
        strategy = PlacementGroupSchedulingStrategy(self.group, rank + 1)
        actor: Any = Worker
        return actor.options(
            num_cpus=bundle.get("CPU", 0),
            num_gpus=bundle.get("GPU", 0),
            scheduling_strategy=strategy,
            name=actor_name(self.model, self.group, f"rank {rank}"),
        ).remote(rank, self.size)

    async def _watch(self, rank: int, ref: Any) -> str:
        """Wait for the end of a rank's loop, which ends the worker group."""
        dead = False
        try:
            await ref
            reason = "has stopped"
        except ActorUnavailableError:
            # The network's fault, perhaps: as long as the rank lives, rounds tell how it does.
            await self._death_of(rank)
            dead, reason = True, "died while it could not be reached"
        except RayActorError:
            dead, reason = True, "died; its node's log may say why (killed, out of memory)"
        except RayError as error:
            reason = first_line(error)
        place = self.places[rank]
        text = f"rank {rank} (process {place['pid']} on {place['host']}): {reason}"
        self.hub.messages.put_nowait(Failure(text, dead))
        return text

    async def _death_of(self, rank: int) -> None:
        """Wait until Ray knows that a rank is dead."""
        name = self.workers[rank]._actor_id.hex()
        while True:
            found = await asyncio.to_thread(actors, name)
            if not found or found["State"] == "DEAD":
                return
            await asyncio.sleep(_LOOK_S)

    def send(self, message: Round[WireRequest] | None) -> None:
        self.hub.broadcast(message)

    async def receive(self) -> Reply:
        """Wait for rank 0's next reply; raises WorkersLost where none will come."""
        try:
            async with asyncio.timeout(self.config.round_timeout_s):
                message = await self.hub.messages.get()
        except TimeoutError:
            raise WorkersLost(
                f"the ranks sent no reply within {self.config.round_timeout_s:g} s "
                "(round_timeout_s); assumed hung"
            ) from None
        if not isinstance(message, Reply):
            raise WorkersLost(await self.reason(message))
        return message

    async def next_failure(self) -> Reply | Failure | None:
        """Wait, while no round is in flight, for what tells that a rank is lost."""
        return await self.hub.messages.get()

    async def reason(self, message: Reply | Failure | None) -> str:
        """Return why the worker group is lost; a rank's death counts before what survivors say."""
        reason = "a rank has closed its connection"
        try:
            async with asyncio.timeout(_DEATH_GRACE_S):
                while True:
                    if isinstance(message, Failure):
                        reason = message.error
                        if message.dead:
                            break
                    message = await self.hub.messages.get()
        except TimeoutError:
            pass
        return reason

    async def close(self, grace: float = 0.0) -> None:
        """End the ranks: by a word and within `grace` seconds, else by force."""
        stuck = self.places
        if grace > 0 and self._loops:
            self.send(None)
            await asyncio.wait(self._loops, timeout=grace)
            ranks = zip(self.places, self._loops, strict=True)
            stuck = [place for place, loop in ranks if not loop.done()]
        for worker in self.workers:
            ray.kill(worker, no_restart=True)
        kill_here(stuck)
        for task in self._loops:
            task.cancel()
        await self.hub.close()


def kill_here(places: list[Place]) -> None:
    """Kill the processes of this node: Ray asks first, and a hung one takes 5 s not to answer."""
    here = ray.get_runtime_context().get_node_id()
    for place in places:
        kill(place, here)


def first_line(error: BaseException) -> str:
    """Return what a remote error says as one line, without Ray's traceback before it."""
    cause = getattr(error, "cause", None)
    if isinstance(cause, BaseException):
        text, name = " ".join(str(cause).split()), type(cause).__name__
        if text and type(cause).__module__.startswith("diffray."):
            return text  # a sentence by itself
        return f"{name}: {text}" if text else name
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1] if lines else type(error).__name__
