"""Several ranks on Ray for a program without a server, as coroutines or blocking.

Ray is imported only when it is needed, after its settings are made.
"""

import asyncio
import atexit
import math
import os
import sys
import threading
from collections import Counter
from collections.abc import Coroutine
from contextlib import aclosing
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any, Final, TypeVar

from diffray.cluster.control.engine_client import EngineFailed
from diffray.cluster.control.engine_config import EngineConfig, RanksOptions
from diffray.cluster.control.events import Event, Kind
from diffray.cluster.control.ray_settings import ALONE, SETTINGS, set_defaults, start_ray_here
from diffray.cluster.control.weight_changes import EngineChange
from diffray.workers.messages import ASLEEP
from diffray.workers.trainer_orders import Received, TrainerOrder

if TYPE_CHECKING:
    from diffray.cluster.control.remote import RemoteEngine
    from diffray.workers.admission import CheckedRequest  # imports torch

T = TypeVar("T")

_COORDINATOR: Final = {"CPU": 1.0}
_ROOM_S: Final = 20.0  # for processes that have just ended to free their resources
_LOOK_S: Final = 0.2
_SILENCE_S: Final = 2.0  # after which sleeping ranks send no more events


def connect_ray(options: RanksOptions) -> None:
    """Use the program's Ray, else the one at RAY_ADDRESS, else start one that ends with it.

    Call it in the main thread, where Ray handles signals.
    """
    given = os.environ.get("RAY_ADDRESS")
    if "ray" not in sys.modules and not given:
        set_defaults(SETTINGS | ALONE)
    import ray

    if ray.is_initialized():
        return
    quiet: dict[str, Any] = {"log_to_driver": False, "logging_level": "WARNING"}
    if given:
        ray.init(**quiet)
        return
    ranks = options.tensor_parallel_size * (options.cpu_threads or 1)
    cpus = max(math.ceil(ranks + _COORDINATOR["CPU"]), os.cpu_count() or 1)
    start_ray_here(num_cpus=cpus, include_dashboard=False, **quiet)


async def start_ranks(model: str, options: RanksOptions) -> "RemoteEngine":
    """Start ranks on the Ray that `connect_ray` found; raise ValueError if they cannot run."""
    from diffray.cluster.control.remote import RemoteEngine

    given = dict(options)
    if options.device == "auto":
        given["device"] = device_of_cluster()
    # All requests belong to one program, so none is refused or preempted for others.
    config = EngineConfig(**given, max_queued_requests=sys.maxsize, time_slice=0)
    bundles = [_COORDINATOR, *[config.rank_bundle] * config.tensor_parallel_size]
    await _room_for(bundles, config)
    try:
        return await RemoteEngine.start(model, config, bundles)
    except EngineFailed as error:
        raise ValueError(str(error)) from None


def device_of_cluster() -> str:
    """Return what device "auto" stands for on the Ray that this process uses."""
    import ray

    return "cuda" if ray.cluster_resources().get("GPU", 0) else "cpu"


async def _room_for(bundles: list[dict[str, float]], config: EngineConfig) -> None:
    """Wait a while for the resources of a placement group; Ray itself would wait forever."""
    import ray

    needed = Counter[str]()
    for bundle in bundles:
        needed.update(bundle)
    end = asyncio.get_running_loop().time() + _ROOM_S
    while True:
        free = ray.available_resources()
        if all(free.get(name, 0) >= amount for name, amount in needed.items()):
            return
        if asyncio.get_running_loop().time() > end:
            wanted = ", ".join(f"{amount:g} {name}" for name, amount in needed.items())
            left = ", ".join(f"{free.get(name, 0):g} {name}" for name in needed)
            raise ValueError(
                f"tensor_parallel_size {config.tensor_parallel_size} needs {wanted}, and Ray has "
                f"{left} free; shut down what uses it (DiffusionLLM.shutdown), or set RAY_ADDRESS "
                "to a larger cluster"
            )
        await asyncio.sleep(_LOOK_S)


class WaitingRanks:
    """A blocking client of ranks, over an event loop in a thread of its own."""

    def __init__(self, model: str, options: RanksOptions) -> None:
        connect_ray(options)
        self._events = SimpleQueue[Event]()
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self.open: set[int] = set()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="ranks", daemon=True)
        self._thread.start()
        atexit.register(self.close)  # before Ray's own, so that no call reaches an ended Ray
        try:
            self._engine = self._wait(start_ranks(model, options))
        except BaseException:
            self._stop()
            raise
        self.limits = self._engine.limits

    def submit(self, request: "CheckedRequest") -> None:
        self.open.add(request.uid)
        self._loop.call_soon_threadsafe(self._start, request)

    def cancel(self, uid: int) -> None:
        self.open.discard(uid)
        self._loop.call_soon_threadsafe(self._end, uid)

    def advance(self, steps: int | None = None) -> list[Event]:
        """Wait for the next events; with `steps` for a single one, so that no canvas is missed."""
        if not self.open and self._events.empty():
            return []
        while True:
            try:
                events = [self._events.get(timeout=_SILENCE_S)]
                break
            except Empty:
                if self.level:  # and the requests that had started have finished
                    raise ValueError(ASLEEP) from None
        while steps is None and not self._events.empty():
            events.append(self._events.get())
        self.open -= {event.uid for event in events if event.ends}
        return events

    def apply(self, change: EngineChange) -> str:
        return self._wait(self._engine.apply(change))

    def ask_trainer(self, order: TrainerOrder) -> Received:
        return self._wait(self._engine.ask_trainer(order))

    @property
    def level(self) -> int:
        return self._engine.weights.level

    def release(self) -> None:
        """Cancel all open requests."""
        for uid in list(self.open):
            self.cancel(uid)

    def close(self) -> None:
        """End the ranks; Ray keeps running."""
        import ray

        if self._loop.is_closed():
            return
        if ray.is_initialized():
            self._wait(self._engine.close())
        self._stop()

    def _stop(self) -> None:
        atexit.unregister(self.close)
        self._wait(_end_all())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def _wait(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine on the loop; if this is interrupted, cancel it."""
        done = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return done.result()
        except BaseException:
            done.cancel()
            raise

    # On the loop.

    def _start(self, request: "CheckedRequest") -> None:
        self._tasks[request.uid] = self._loop.create_task(self._run(request))

    def _end(self, uid: int) -> None:
        if task := self._tasks.get(uid):
            task.cancel()

    async def _run(self, request: "CheckedRequest") -> None:
        try:
            async with aclosing(self._engine.submit(request)) as updates:
                async for update in updates:
                    self._events.put(Event(Kind.UPDATE, request.uid, update))
        except Exception as error:
            # Whatever the error, the caller must not wait forever.
            self._events.put(Event(Kind.FAILED, request.uid, reason=str(error)))
        finally:
            del self._tasks[request.uid]


async def _end_all() -> None:
    """Cancel the loop's other tasks, and wait for their cleanup."""
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)
