"""Answers the batches of a store, in the room that other requests leave."""

import asyncio
import logging
import time
from collections import defaultdict
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager, suppress
from itertools import count
from typing import Final, Protocol

from diffray.cluster.api.batch_lines import CHAT, Reply, pause
from diffray.cluster.api.batch_store import ENDED, BatchStore
from diffray.cluster.api.bodies import ChatBody, CompletionBody, GenerationBody
from diffray.cluster.api.errors import ApiError, Json, bug
from diffray.cluster.api.openapi import without_unknown
from diffray.cluster.api.running_batch import RunningBatch
from diffray.cluster.api.settings import ApiSettings
from diffray.cluster.control.engine_client import Load

log = logging.getLogger("ray.serve")

AWAY: Final = (429, 502, 503)  # statuses of models that are busy, or restart
MOST_BATCHES: Final = 8  # that run at once; those that were created first
_LOOK_S: Final = 1.0  # between looks at the store and at the load
_RETRY_S: Final = 10.0  # before a batch is tried again after an error


class Models(Protocol):
    """What answers: an ingress to several models, or to one."""

    async def whole(
        self, kind: type[GenerationBody], given: object, *, background: bool
    ) -> Json: ...

    async def load(self, name: str | None) -> Load: ...


class Room:
    """How many requests of batches to a model may be in flight: as many as others leave."""

    def __init__(self) -> None:
        self.limit, self.in_flight, self.waiting = 1, 0, 0
        self._changed = asyncio.Condition()

    async def follow(self, load: Load) -> None:
        others = max(load.running + load.waiting - self.in_flight, 0)
        self.limit = max(load.slots - others, 1)  # one starts a replica if there is none
        async with self._changed:
            self._changed.notify_all()

    @asynccontextmanager
    async def taken(self) -> AsyncGenerator[None, None]:
        """Take the place of one request."""
        self.waiting += 1
        try:
            async with self._changed:
                await self._changed.wait_for(lambda: self.in_flight < self.limit)
                self.in_flight += 1
        finally:
            self.waiting -= 1
        try:
            yield
        finally:
            self.in_flight -= 1
            async with self._changed:
                self._changed.notify()


class BatchRunner:
    """Begins each batch that has not ended, and continues those that another process began."""

    def __init__(self, store: BatchStore, models: Models, settings: ApiSettings) -> None:
        self._store, self._models, self._settings = store, models, settings
        self._rooms: defaultdict[str | None, Room] = defaultdict(Room)  # by the model's name
        self._running: dict[str, RunningBatch] = {}
        self._ended: set[str] = set()

    async def run(self) -> None:
        """Answer batches until cancelled."""
        failed = ""
        try:
            while True:
                try:
                    await self._look()
                    failed = ""
                except Exception as error:  # the store may be away for a while
                    if repr(error) != failed:
                        log.exception("the store of batches cannot be read; trying again")
                    failed = repr(error)
                await self._follow_loads()
                await asyncio.sleep(_LOOK_S)
        finally:
            for each in self._running.values():
                each.task.cancel()

    async def _look(self) -> None:
        """Begin new batches, and end those that clients have cancelled."""
        await self._look_at_running()
        for name in await asyncio.to_thread(self._store.batches):
            if len(self._running) >= MOST_BATCHES:
                return
            if name in self._running or name in self._ended:
                continue
            try:
                batch = await asyncio.to_thread(self._store.batch, name)
            except (ApiError, ValueError) as error:  # a damaged object
                log.error("batch %s cannot be read: %s", name, error)
                self._ended.add(name)
                continue
            if batch["status"] in ENDED:
                self._ended.add(name)
            else:
                most = self._settings.max_body_bytes
                self._running[name] = RunningBatch(self._store, batch, self._answer, most)

    async def _look_at_running(self) -> None:
        for name, running in [*self._running.items()]:
            if not running.task.done():
                if await asyncio.to_thread(self._store.is_cancelled, name):
                    running.cancel()
            elif (error := running.task.exception()) is None:
                del self._running[name]
                self._ended.add(name)
            elif time.monotonic() > running.begun + _RETRY_S:
                log.error("batch %s is continued after an error", name, exc_info=error)
                del self._running[name]

    async def _follow_loads(self) -> None:
        for name, room in [*self._rooms.items()]:
            if not room.in_flight and not room.waiting:
                del self._rooms[name]
                continue
            load = Load()
            with suppress(ApiError):
                load = await self._models.load(name)
            await room.follow(load)

    async def _answer(self, url: str, body: Json) -> Reply:
        """Answer a request, however long the models are busy or away."""
        for attempt in count():
            reply = await self._try(url, body)
            if reply.status_code not in AWAY:
                break
            await asyncio.sleep(pause(min(attempt, 6), reply.retry_after))
        return reply

    async def _try(self, url: str, body: Json) -> Reply:
        kind: type[GenerationBody] = ChatBody if url == CHAT else CompletionBody
        given: object = body
        name = body.get("model")
        if self._settings.ignore_unknown_fields:
            given, _ = without_unknown(body, kind)
        async with self._rooms[name if isinstance(name, str) else None].taken():
            try:
                made = await self._models.whole(kind, given, background=True)
            except ApiError as error:
                return Reply(error.status, "", error.body, error.retry_after)
            except Exception:
                log.exception("a request of a batch failed")
                return Reply(500, "", bug().body)
            return Reply(200, str(made["id"]), made)
