"""The ranks of one replica as Ray actors: started, driven and ended together."""

import asyncio
import logging
import secrets
import time
from collections.abc import Awaitable, Iterable
from functools import partial
from typing import Any

import ray
from ray.exceptions import ActorUnavailableError, RayActorError, RayError
from ray.util.placement_group import PlacementGroup
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from diffray.cluster.control.actors import DIED, actor_name, announce, first_line, kill_here
from diffray.cluster.control.engine_client import EngineFailed
from diffray.cluster.control.engine_config import EngineConfig
from diffray.cluster.control.rank_channel import LOADING, Failure, RankChannel
from diffray.workers.limits import Limits
from diffray.workers.messages import ControlAddress, RankPlace, RankSetup, Reply, Round, WireRequest
from diffray.workers.trainer_orders import Received, TrainerOrder

log = logging.getLogger(__name__)

_DEATH_GRACE_S = 1.0  # after a rank's error, for Ray to report the death of another
_LOOK_S = 0.5  # between checks whether a rank that Ray could not reach is alive
_NO_ROUND = 0  # the number of a message that is not a round; rounds count from 1


class WorkersLost(EngineFailed):
    """A rank died, hung or failed, which ends the worker group."""


class WorkerGroup:
    """One worker in each bundle after the first, and a control channel to all of them."""

    def __init__(self, model: str, config: EngineConfig, group: PlacementGroup) -> None:
        self.model, self.config, self.group = model, config, group
        self.size = config.tensor_parallel_size
        silence = LOADING * config.heartbeat_timeout_s
        self.channel = RankChannel(
            self.size, secrets.token_bytes(32), silence, partial(announce, model)
        )
        self.limits: Limits | None = None  # once the ranks have loaded
        self.places: list[RankPlace] = []
        self.workers: list[Any] = []
        self._loops: list[asyncio.Task[None]] = []
        self._changes: set[int] = set()  # rounds in flight in which the ranks read weights

    async def start(self) -> None:
        """Place the ranks, and wait until they have loaded; raise WorkersLost if one fails."""
        begin = time.monotonic()
        try:
            async with asyncio.timeout(self.config.load_timeout_s):
                await self._connect()
                placed = time.monotonic() - begin
                await self._load()
        except RayError as error:
            raise WorkersLost(f"a rank could not start: {first_line(error)}") from error
        except TimeoutError:
            raise WorkersLost(
                f"the ranks were not ready within {self.config.load_timeout_s:g} s; "
                "raise load_timeout_s if the checkpoint is large or the disk slow"
            ) from None
        log.info(
            "%d ranks ready after %.1f s, with processes after %.1f s",
            self.size, time.monotonic() - begin, placed,
        )  # fmt: skip

    async def _connect(self) -> None:
        """Start the ranks' processes, which connect to the channel."""
        host = ray.util.get_node_ip_address()
        own = ControlAddress(host, await self.channel.listen(host), self.channel.secret)
        self.workers = [self._create(rank) for rank in range(self.size)]
        wait = self.config.heartbeat_s, self.config.load_timeout_s
        self.places = await asyncio.gather(*(w.place.remote(own, *wait) for w in self.workers))
        await self.channel.complete.wait()

    async def _load(self) -> None:
        """Have the ranks load the model, and start their loops."""
        config = self.config
        nodes = {place.process.node for place in self.places}
        log.info("loading %s on %d ranks over %d nodes", self.model, self.size, len(nodes))
        setup = RankSetup(
            self.model,
            config.rank_options,
            expert_parallel=config.expert_parallel,
            collective_timeout_s=config.round_timeout_s,
            load_timeout_s=config.load_timeout_s,
        )
        store = self.places[0].host, self.places[0].port
        self.limits, *_ = await self._unless_hung(
            worker.start.remote(setup, *store) for worker in self.workers
        )
        for rank, worker in enumerate(self.workers):
            self._loops.append(asyncio.create_task(self._watch(rank, worker.run.remote())))
        self.channel.expect_within(config.heartbeat_timeout_s)

    def _create(self, rank: int) -> Any:
        from diffray.workers.worker import Worker  # imports torch only in its actors

        bundle = self.group.bundle_specs[rank + 1]
        actor: Any = Worker
        return actor.options(
            num_cpus=bundle.get("CPU", 0),
            num_gpus=bundle.get("GPU", 0),
            scheduling_strategy=PlacementGroupSchedulingStrategy(self.group, rank + 1),
            name=actor_name(self.model, self.group, f"rank {rank}"),
        ).remote(rank, self.size)

    async def _unless_hung(self, calls: Iterable[Awaitable[Any]]) -> list[Any]:
        """Return the results of calls; Ray reports a rank that dies, the channel one that hangs."""
        results = asyncio.gather(*calls)
        while not results.done():
            failure = asyncio.create_task(self.next_failure())
            both: list[asyncio.Future[Any]] = [results, failure]
            await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
            failure.cancel()
            if failure.done() and isinstance(found := failure.result(), Failure):
                results.cancel()
                raise WorkersLost(found.error)
        return await results

    async def _watch(self, rank: int, ref: Any) -> None:
        """Wait for the end of a rank's loop, which ends the worker group."""
        dead = True
        try:
            await ref
            dead, reason = False, "has stopped"
        except ActorUnavailableError:
            # Perhaps a network fault: while the rank lives, only its replies count.
            await self._death_of(rank)
            reason = "died while it could not be reached"
        except RayActorError:
            reason = DIED
        except RayError as error:
            dead, reason = False, f"failed: {first_line(error)}"
        place = self.places[rank]
        name = f"rank {rank} (process {place.process.pid} on {place.host})"
        self.channel.messages.put_nowait(Failure(f"{name} {reason}", dead))

    async def _death_of(self, rank: int) -> None:
        """Wait until Ray knows that a rank is dead."""
        while True:
            try:
                await self.workers[rank].__ray_ready__.remote()  # after its loop, if it lives
            except ActorUnavailableError:
                pass
            except RayActorError:
                return
            await asyncio.sleep(_LOOK_S)

    def send(self, message: Round[WireRequest] | None) -> None:
        if message is not None and (message.change or message.trainer):
            self._changes.add(message.number)
            self.channel.expect_within(LOADING * self.config.heartbeat_timeout_s)
        self.channel.broadcast(message)

    async def receive(self) -> Reply:
        """Wait for rank 0's next reply; raise WorkersLost if none will come."""
        name = "load_timeout_s" if self._changes else "round_timeout_s"
        limit = self.config.load_timeout_s if self._changes else self.config.round_timeout_s
        try:
            async with asyncio.timeout(limit):
                message = await self.channel.messages.get()
        except TimeoutError:
            raise WorkersLost(
                f"the ranks sent no reply within {limit:g} s ({name}); assumed hung"
            ) from None
        if not isinstance(message, Reply):
            raise WorkersLost(await self.reason(message))
        if message.number in self._changes:
            self._changes.remove(message.number)
            self.channel.expect_within(self.config.heartbeat_timeout_s)
        return message

    async def ask_trainer(self, order: TrainerOrder) -> Received:
        """Have all ranks carry out a trainer's order; no round may be in flight."""
        self.send(Round(_NO_ROUND, [], [], 0, trainer=order))
        reply = await self.receive()
        assert reply.received is not None, "a reply to something else"
        return reply.received

    async def next_failure(self) -> Reply | Failure | None:
        """Wait, while no round is in flight, for the first sign that a rank is lost."""
        return await self.channel.messages.get()

    async def reason(self, message: Reply | Failure | None) -> str:
        """Return why the worker group is lost; a rank's death counts before other errors."""
        reason = "a rank has closed its connection"
        try:
            async with asyncio.timeout(_DEATH_GRACE_S):
                while True:
                    if isinstance(message, Failure):
                        reason = message.error
                        if message.dead:
                            break
                    message = await self.channel.messages.get()
        except TimeoutError:
            pass
        return reason

    async def close(self, grace: float = 0.0) -> None:
        """End the ranks: ask them to end within `grace` seconds, then kill them."""
        stuck = [place.process for place in self.places]
        if grace > 0 and self._loops:
            self.send(None)
            await asyncio.wait(self._loops, timeout=grace)
            ranks = zip(self.places, self._loops, strict=True)
            stuck = [place.process for place, loop in ranks if not loop.done()]
        for worker in self.workers:
            ray.kill(worker, no_restart=True)
        kill_here(stuck)
        for task in self._loops:
            task.cancel()
        await self.channel.close()
