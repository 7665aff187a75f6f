"""One batch in progress, from its first line to its files.

Answers are stored every few seconds. A process that continues the work sends what has no answer
yet, so that no line is lost or answered twice.
"""

import asyncio
import json
import logging
import time
from collections.abc import Iterator, Set
from itertools import count
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

from diffray.cluster.api.batch_lines import (
    Answer,
    Line,
    Mistake,
    Reply,
    answer_line,
    answer_lines,
    check_lines,
    read_lines,
)
from diffray.cluster.api.batch_store import ENDED, OUTPUT, BatchStore
from diffray.cluster.api.errors import Json

log = logging.getLogger("ray.serve")

TRIES: Final = 3  # of a request that takes too long
MOST_AT_ONCE: Final = 256  # requests of a batch that wait or run
MOST_LINES: Final = 50_000  # of a batch, as at OpenAI
_STORE_S: Final = 3.0  # between parts of a batch's answers


class Ended(Exception):
    """Another process has ended the batch."""


class RunningBatch:
    """Requests larger than `max_bytes` are refused, as the endpoint would."""

    def __init__(self, store: BatchStore, batch: Json, answer: Answer, max_bytes: int) -> None:
        self._store, self._batch, self._answer = store, batch, answer
        self._name, self._max_bytes = str(batch["id"]), max_bytes
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

    @property
    def _is_over(self) -> bool:
        return self._cancelled or time.time() >= self._batch["expires_at"]

    async def _run(self) -> None:
        try:
            with TemporaryDirectory() as folder:
                await self._run_in(Path(folder))
        except Ended:
            log.warning("another process has ended batch %s", self._name)
        except Exception as error:
            if self._is_over:
                await self._fail([Mistake(None, f"the server failed: {error!r:.200}")])
            raise

    async def _run_in(self, folder: Path) -> None:
        source = folder / "requests"
        ids, mistakes = await asyncio.to_thread(self._checked, source)
        known = await asyncio.to_thread(self._known)
        if mistakes:
            files = await asyncio.to_thread(self._write_files, folder, set[str](), "failed")
            await self._fail(mistakes, **files)
            return
        self._counts["total"] = len(ids)
        await self._write("in_progress", in_progress_at=self._batch["in_progress_at"] or _now())
        waiting = (line for line in read_lines(source) if line.custom_id not in known)
        await self._answer_until_end(waiting, min(len(ids - known), MOST_AT_ONCE))
        end = "completed"
        if self._cancelled:
            end = "cancelled"
        elif self._counts["completed"] + self._counts["failed"] < len(ids):
            end = "expired"
        await self._write("finalizing", finalizing_at=_now())
        files = await asyncio.to_thread(self._write_files, folder, ids, end)
        if self._cancelled:
            asked = await asyncio.to_thread(self._store.batch, self._name)
            files["cancelling_at"] = asked["cancelling_at"]
        await self._write(end, **files, **{f"{end}_at": _now()})
        await asyncio.to_thread(self._store.forget_answers, self._name)

    def _checked(self, source: Path) -> tuple[Set[str], list[Mistake]]:
        """Return the ids of the requests, and what is wrong with the file."""
        lines, most = count(1), self._max_bytes

        def check(line: Line, size: int) -> None:
            if line.url != self._batch["endpoint"]:
                raise ValueError(f"url is {line.url}, but the batch's is {self._batch['endpoint']}")
            if size > most:
                raise ValueError(f"the request is larger than {most} bytes")
            if next(lines) > MOST_LINES:
                raise ValueError(f"a batch has at most {MOST_LINES} requests")

        try:
            self._store.download(self._batch["input_file_id"], source)
        except FileNotFoundError:
            return set(), [Mistake(None, "the input file has been deleted")]
        return check_lines(source, check)

    def _known(self) -> set[str]:
        """Count the answers that are stored; return their ids."""
        known = set[str]()
        for answer in self._store.answers(self._name):
            known.add(answer["custom_id"])
            self._counts["completed" if _is_right(answer) else "failed"] += 1
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

    async def _store_answers(self) -> None:
        lines, self._unstored = self._unstored, []
        if lines:
            await asyncio.to_thread(self._store.add_answers, self._name, lines)
            for line in lines:
                self._counts["completed" if _is_right(json.loads(line)) else "failed"] += 1
            await self._write(self._batch["status"])

    def _write_files(self, folder: Path, ids: Set[str], end: str) -> Json:
        """Make files of the answers; return their identifiers."""
        paths = {name: folder / name for name in ("output", "errors")}
        with paths["output"].open("w") as output, paths["errors"].open("w") as errors:
            found, left = 0, dict.fromkeys(ids)
            for answer in self._store.answers(self._name):
                left.pop(answer["custom_id"], None)
                found += 1
                kept = output if _is_right(answer) else errors
                kept.write(json.dumps(answer, ensure_ascii=False) + "\n")
            if found < self._counts["completed"] + self._counts["failed"]:
                raise Ended  # and has deleted the answers
            how = "was cancelled" if end == "cancelled" else end
            error = {"code": f"batch_{end}", "message": f"The batch {how} before this request."}
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

    async def _fail(self, mistakes: list[Mistake], **files: str) -> None:
        data = [
            {"code": "invalid_request", "message": each.message, "param": None, "line": each.line}
            for each in mistakes
        ]
        errors = {"object": "list", "data": data}
        await self._write("failed", errors=errors, failed_at=_now(), **files)

    async def _write(self, status: str, **changes: Any) -> None:
        self._batch |= {"status": status, "request_counts": dict(self._counts), **changes}
        asked = ("id", "object", "input_file_id", "endpoint", "completion_window", "metadata")
        state = {name: value for name, value in self._batch.items() if name not in asked}

        def write() -> None:
            if self._store.batch(self._name)["status"] in ENDED:
                raise Ended
            self._store.write_state(self._name, state)

        await asyncio.to_thread(write)


def _now() -> int:
    return int(time.time())


def _is_right(answer: Json) -> bool:
    return (answer["response"] or {}).get("status_code") == 200
