"""Answers the batches of a store, in the room that other requests leave.

Answers are stored every few seconds. A process that continues the work sends what has no answer
yet, so that no line is lost or answered twice.
"""

import asyncio
import json
import logging
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, suppress
from itertools import count
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

from diffray.cluster.api.batch_lines import (
    CHAT,
    Answer,
    Line,
    Mistake,
    Reply,
    answer_line,
    answer_lines,
    check_lines,
    pause,
    read_lines,
)
from diffray.cluster.api.batch_store import ENDED, OUTPUT, BatchStore
from diffray.cluster.api.bodies import ChatBody, CompletionBody, GenerationBody
from diffray.cluster.api.errors import ApiError, Json, bug
from diffray.cluster.control.engine_client import Load

log = logging.getLogger("ray.serve")

PRIORITY: Final = 2**20  # of the requests of batches: all others run first
AWAY: Final = (429, 502, 503)  # statuses of models that are busy, or restart
TRIES: Final = 3  # of a request that takes too long
MOST_AT_ONCE: Final = 1024  # requests of a batch that wait or run
_LOOK_S: Final = 1.0  # between looks at the store and at the load
_STORE_S: Final = 3.0  # between parts of a batch's answers
_RETRY_S: Final = 10.0  # before a batch is tried again whose store failed
_MOST_MISTAKES: Final = 100  # that a failed batch lists

Ask = Callable[[type[GenerationBody], Json, int], Awaitable[Json]]


class Room:
    """How many requests of batches may be in flight: as many as others leave."""

    def __init__(self) -> None:
        self.limit, self.in_flight = 1, 0
        self._changed = asyncio.Condition()

    async def follow(self, load: Load) -> None:
        others = max(load.running + load.waiting - self.in_flight, 0)
        self.limit = max(load.slots - others, 1)  # one starts a replica if there is none
        async with self._changed:
            self._changed.notify_all()

    @asynccontextmanager
    async def taken(self) -> AsyncGenerator[None, None]:
        """Take the place of one request."""
        async with self._changed:
            await self._changed.wait_for(lambda: self.in_flight < self.limit)
            self.in_flight += 1
        try:
            yield
        finally:
            self.in_flight -= 1
            async with self._changed:
                self._changed.notify()


class BatchRunner:
    """Begins each batch that has not ended, and continues those that another process began."""

    def __init__(self, store: BatchStore, ask: Ask, load: Callable[[], Awaitable[Load]]) -> None:
        self._store, self._ask, self._load = store, ask, load
        self._room = Room()
        self._running: dict[str, Running] = {}
        self._ended: set[str] = set()

    async def run(self) -> None:
        """Answer batches until cancelled."""
        try:
            while True:
                with suppress(OSError):  # the store may be away for a while
                    await self._look()
                if self._running:
                    await self._room.follow(await self._load())
                await asyncio.sleep(_LOOK_S)
        finally:
            for each in self._running.values():
                each.task.cancel()

    async def _look(self) -> None:
        """Begin new batches, and end those that clients have cancelled."""
        for name in await asyncio.to_thread(self._store.batches):
            if name in self._running or name in self._ended:
                continue
            batch = await asyncio.to_thread(self._store.batch, name)
            if batch["status"] in ENDED:
                self._ended.add(name)
            else:
                self._running[name] = Running(self._store, batch, self._answer)
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

    async def _answer(self, url: str, body: Json) -> Reply:
        """Answer a request, however long the models are busy or away."""
        for attempt in count():
            reply = await self._try(url, body)
            if reply.status_code not in AWAY:
                break
            await asyncio.sleep(pause(min(attempt, 6), reply.retry_after))
        return reply

    async def _try(self, url: str, body: Json) -> Reply:
        async with self._room.taken():
            try:
                kind = ChatBody if url == CHAT else CompletionBody
                made = await self._ask(kind, body, PRIORITY)
            except ApiError as error:
                return Reply(error.status, "", error.body, error.retry_after)
            except Exception:
                log.exception("a request of a batch failed")
                return Reply(500, "", bug().body)
            return Reply(200, str(made["id"]), made)


class Running:
    """One batch, from its first line to its files."""

    def __init__(self, store: BatchStore, batch: Json, answer: Answer) -> None:
        self._store, self._batch, self._answer = store, batch, answer
        self._name = str(batch["id"])
        self._counts = {"total": 0, "completed": 0, "failed": 0}
        self._unstored: list[str] = []
        self._answering: asyncio.Task[None] | None = None
        self._cancelled = False
        self.begun, self.task = time.monotonic(), asyncio.create_task(self._run())

    def cancel(self) -> None:
        """End the batch with the answers that it has."""
        self._cancelled = True
        if self._answering is not None:
            self._answering.cancel()

    async def _run(self) -> None:
        with TemporaryDirectory() as folder:
            source = Path(folder) / "requests"
            ids, mistakes = await asyncio.to_thread(self._checked, source)
            if mistakes:
                await self._write("failed", errors=_errors(mistakes), failed_at=_now())
                return
            done = await asyncio.to_thread(self._known)
            self._counts["total"] = len(ids)
            began = self._batch["in_progress_at"] or _now()
            await self._write("in_progress", in_progress_at=began)
            waiting = (line for line in read_lines(source) if line.custom_id not in done)
            at_once = min(len(ids) - len(done), MOST_AT_ONCE)
            await self._answer_until_end(waiting, at_once)
            end = "completed"
            if self._cancelled:
                end = "cancelled"
            elif self._counts["completed"] + self._counts["failed"] < len(ids):
                end = "expired"
            await self._write("finalizing", finalizing_at=_now())
            files = await asyncio.to_thread(self._write_files, Path(folder), ids, end)
            if self._cancelled:
                known = await asyncio.to_thread(self._store.batch, self._name)
                files["cancelling_at"] = known["cancelling_at"]
            await self._write(end, **files, **{f"{end}_at": _now()})
            await asyncio.to_thread(self._store.forget_answers, self._name)

    def _checked(self, source: Path) -> tuple[set[str], list[Mistake]]:
        """Return the ids of the requests, and what is wrong with the file."""
        try:
            self._store.download(self._batch["input_file_id"], source)
        except FileNotFoundError:
            return set(), [Mistake(None, "the input file has been deleted")]
        ids, mistakes = check_lines(source)
        if not mistakes:
            mistakes = [
                Mistake(number, f"url is {line.url}, but the batch's is {self._batch['endpoint']}")
                for number, line in enumerate(read_lines(source), 1)
                if line.url != self._batch["endpoint"]
            ]
        return ids, mistakes

    def _known(self) -> set[str]:
        """Count the answers that are stored; return their ids."""
        known = set[str]()
        for answer in self._store.answers(self._name):
            known.add(answer["custom_id"])
            self._count(_is_right(answer))
        return known

    async def _answer_until_end(self, lines: Iterator[Line], at_once: int) -> None:
        """Answer lines until there are none, or the batch expires or is cancelled."""
        self._answering = asyncio.create_task(
            answer_lines(lines, self._answer, self._keep, at_once, TRIES)
        )
        if self._cancelled:
            self._answering.cancel()
        try:
            while not self._answering.done():
                left = self._batch["expires_at"] - time.time()
                if left <= 0:
                    self._answering.cancel()
                pause_s = min(left, _STORE_S) if left > 0 else _STORE_S
                await asyncio.wait([self._answering], timeout=pause_s)
                await self._store_answers()
        finally:
            self._answering.cancel()
        if not self._answering.cancelled():
            self._answering.result()  # raises what ended it

    def _keep(self, line: str, reply: Reply | None) -> None:
        self._unstored.append(line)
        self._count(reply is not None and reply.status_code == 200)

    def _count(self, right: bool) -> None:
        self._counts["completed" if right else "failed"] += 1

    async def _store_answers(self) -> None:
        lines, self._unstored = self._unstored, []
        if lines:
            await asyncio.to_thread(self._store.add_answers, self._name, lines)
            await self._write(self._batch["status"])

    def _write_files(self, folder: Path, ids: set[str], end: str) -> Json:
        """Make files of the answers; return their identifiers."""
        paths = {name: folder / name for name in ("output", "errors")}
        with paths["output"].open("w") as output, paths["errors"].open("w") as errors:
            left = dict.fromkeys(ids)
            for answer in self._store.answers(self._name):
                left.pop(answer["custom_id"], None)
                kept = output if _is_right(answer) else errors
                kept.write(json.dumps(answer, ensure_ascii=False) + "\n")
            error = {"code": f"batch_{end}", "message": f"The batch {end} before this request."}
            for name in left:
                errors.write(answer_line(name, None, error) + "\n")
        made: Json = {}
        for field, name in (("output_file_id", "output"), ("error_file_id", "errors")):
            if paths[name].stat().st_size:
                with paths[name].open("rb") as file:
                    identifier = f"{self._name.replace('batch_', 'file-')}-{name}"
                    filename = f"{self._name}_{name}.jsonl"
                    self._store.add_file(filename, OUTPUT, file, identifier)
                made[field] = identifier
        return made

    async def _write(self, status: str, **changes: Any) -> None:
        self._batch |= {"status": status, "request_counts": dict(self._counts), **changes}
        asked = ("id", "object", "input_file_id", "endpoint", "completion_window", "metadata")
        state = {name: value for name, value in self._batch.items() if name not in asked}
        await asyncio.to_thread(self._store.write_state, self._name, state)


def _now() -> int:
    return int(time.time())


def _is_right(answer: Json) -> bool:
    return (answer["response"] or {}).get("status_code") == 200


def _errors(mistakes: list[Mistake]) -> Json:
    data = [
        {"code": "invalid_request", "message": each.message, "param": None, "line": each.line}
        for each in mistakes[:_MOST_MISTAKES]
    ]
    return {"object": "list", "data": data}
