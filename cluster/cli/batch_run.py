"""Answers a file of requests in OpenAI's batch format, and writes one line per answer.

Answers are written as they arrive, so an interrupted batch loses only the requests in flight; the
next run continues with the lines that have no answer yet.
"""

import asyncio
import json
import logging
import sys
from collections.abc import Awaitable, Callable, Iterator
from contextlib import AbstractAsyncContextManager, closing
from dataclasses import dataclass
from pathlib import Path
from time import monotonic
from typing import Any, Literal, TextIO
from uuid import uuid4

from pydantic import Field
from tqdm import tqdm

from diffray.components.config import Config, counted

log = logging.getLogger(__name__)

CHAT = "/v1/chat/completions"
SHOWN_MISTAKES = 5


class Line(Config):
    """One request of a batch."""

    custom_id: str = Field(min_length=1)
    method: Literal["POST"]
    url: Literal["/v1/chat/completions", "/v1/completions"]
    body: dict[str, Any]


def read_lines(source: Path) -> Iterator[Line]:
    """Yield the requests of a file that passed `check_lines`."""
    for _, text in _texts(source):
        yield _line(text)


def check_lines(source: Path) -> set[str]:
    """Return the ids of all requests; raise if any line is invalid."""
    ids: dict[str, int] = {}
    mistakes = []
    for number, text in _texts(source):
        try:
            name = _line(text).custom_id
            if name in ids:
                raise ValueError(f"custom_id {name!r} is already used in line {ids[name]}")
            ids[name] = number
        except ValueError as error:
            mistakes.append(f"line {number}: {error}")
    if more := len(mistakes[SHOWN_MISTAKES:]):
        mistakes[SHOWN_MISTAKES:] = [f"and {more} more"]
    if mistakes:
        raise ValueError(f"{source}: {'; '.join(mistakes)}")
    if not ids:
        raise ValueError(f"{source} has no requests")
    return set(ids)


def repair(target: Path) -> dict[str, bool]:
    """Return whether each id in `target` was answered; cut off an incomplete last line."""
    if not target.exists():
        return {}
    ids = {}
    with target.open("rb+") as file:
        finished = 0  # bytes
        for number, text in enumerate(file, start=1):
            if not text.endswith(b"\n"):
                log.warning("%s: the last line is incomplete and is replaced", target)
                file.truncate(finished)
                break
            finished += len(text)
            try:
                line = json.loads(text)
                ids[str(line["custom_id"])] = (line.get("response") or {}).get("status_code") == 200
            except (ValueError, KeyError, TypeError, AttributeError):
                raise ValueError(
                    f"{target}, line {number} is not an answer of a batch; give another output"
                ) from None
    return ids


def _texts(source: Path) -> Iterator[tuple[int, bytes]]:
    with source.open("rb") as file:
        yield from ((number, text) for number, text in enumerate(file, 1) if text.strip())


def _line(text: bytes) -> Line:
    try:
        given = json.loads(text)
    except ValueError as error:
        raise ValueError(f"not valid JSON: {error}") from None
    if not isinstance(given, dict):
        raise ValueError("expected an object with custom_id, method, url and body")
    line = Line(**given)
    if line.body.get("stream"):
        raise ValueError("body.stream: a batch cannot stream; leave it out")
    return line


BUSY = (429, 502, 503, 504)  # statuses on which a request is retried
TRIES = 8
LONGEST_PAUSE = 60.0
LOG_SECONDS = 10.0


@dataclass(frozen=True, slots=True)
class Reply:
    """The outcome of a request, in HTTP's terms."""

    status_code: int
    request_id: str
    body: Any
    retry_after: float | None = None


class Unanswered(Exception):
    """One request failed although the server is reachable; the message says why."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


# Sends a request to a server or an engine. It raises Unanswered if only this request failed,
# ConnectionError if all others would fail too.
Answer = Callable[[str, dict[str, Any]], Awaitable[Reply]]


@dataclass(slots=True)
class Summary:
    """The counts of a batch."""

    requests: int
    before: int = 0  # done in an earlier run
    failed_before: int = 0  # those of `before` that failed
    answered: int = 0
    failed: int = 0
    tokens: int = 0  # generated, from the answers' usage
    seconds: float = 0.0
    interrupted: bool = False

    @property
    def left(self) -> int:
        return self.requests - self.before - self.answered - self.failed

    def count(self, reply: Reply | None) -> None:
        """Count a finished request; `reply` is None if it got no answer."""
        if reply is None or reply.status_code != 200:
            self.failed += 1
            return
        self.answered += 1
        match reply.body:
            case {"usage": {"completion_tokens": int(tokens)}}:
                self.tokens += tokens

    def __str__(self) -> str:
        text = (
            f"{counted(self.requests, 'request')}: {self.answered} answered, {self.failed} failed"
        )
        if self.before:
            text += f", {self.before} done before"
        if self.left:
            text += f", {self.left} left (run again to continue)"
        rate = self.tokens / max(self.seconds, 1e-9)
        return (
            text + f"; {counted(self.tokens, 'token')}, {rate:.1f} tokens/s ({self.seconds:.1f} s)"
        )


class Progress:
    """Shows a batch's progress: a bar on a terminal, else a line every `log_seconds`."""

    def __init__(
        self, summary: Summary, file: TextIO | None = None, log_seconds: float = LOG_SECONDS
    ) -> None:
        self._summary, self._file = summary, file or sys.stderr
        self._log_seconds, self._logged = log_seconds, monotonic()
        self._bar = tqdm(
            total=summary.requests,
            initial=summary.before,
            unit="request",
            file=self._file,
            leave=False,
            disable=None,  # tqdm disables the bar if this is no terminal
        )

    def close(self) -> None:
        self._bar.close()

    def count(self, reply: Reply | None) -> None:
        """Count a finished request, as the summary does, and show that it is done."""
        self._summary.count(reply)
        failed, done = self._summary.failed, self._summary.requests - self._summary.left
        if failed:
            self._bar.set_postfix(failed=failed, refresh=False)
        self._bar.update()
        if self._bar.disable and monotonic() - self._logged >= self._log_seconds:
            self._logged = monotonic()
            text = f"{done} of {self._summary.requests} done, {failed} failed"
            print(text, file=self._file, flush=True)


def run_batch(
    source: Path,
    target: Path,
    backend: AbstractAsyncContextManager[Answer],
    *,
    concurrency: int = 64,
    tries: int = TRIES,
) -> Summary:
    """Answer every line of `source` that has no line in `target` yet; append to `target`.

    Nothing is sent if a line of `source` is invalid. Ctrl-C ends the batch and keeps the answers.
    """
    if concurrency < 1:
        raise ValueError(f"concurrency must be at least 1 (given: {concurrency})")
    if not source.is_file():
        raise ValueError(f"no such file: {source}; give one with a request per line")
    if target.exists() and target.samefile(source):
        raise ValueError(f"{target} is the input; give another file for the answers")
    ids = check_lines(source)
    done = repair(target)
    before = [done[name] for name in ids & done.keys()]
    summary = Summary(len(ids), before=len(before), failed_before=before.count(False))
    if summary.left == 0:
        return summary
    waiting = (line for line in read_lines(source) if line.custom_id not in done)

    try:
        concurrency = min(concurrency, summary.left)
        asyncio.run(_run(waiting, target, backend, summary, concurrency, tries))
    except KeyboardInterrupt:
        summary.interrupted = True
    return summary


async def _run(
    lines: Iterator[Line],
    target: Path,
    backend: AbstractAsyncContextManager[Answer],
    summary: Summary,
    concurrency: int,
    tries: int,
) -> None:
    with closing(Progress(summary)) as progress:
        async with backend as answer:
            begin = monotonic()  # with the model loaded
            try:
                await answer_lines(lines, target, answer, progress, concurrency, tries)
            finally:
                summary.seconds = monotonic() - begin


async def answer_lines(
    lines: Iterator[Line],
    target: Path,
    answer: Answer,
    progress: Progress,
    concurrency: int,
    tries: int = TRIES,
) -> None:
    """Send all requests and append their answers; an error that affects them all is raised."""

    async def work() -> None:
        for line in lines:
            reply = error = None
            try:
                reply = await _send(answer, line, tries)
            except Unanswered as reason:
                error = {"code": reason.code, "message": str(reason)}
            out.write(_result(line.custom_id, reply, error) + "\n")
            out.flush()
            progress.count(reply)

    with target.open("a") as out:
        try:
            async with asyncio.TaskGroup() as group:
                for _ in range(concurrency):
                    group.create_task(work())
        except ExceptionGroup as errors:
            raise errors.exceptions[0] from None


async def _send(answer: Answer, line: Line, tries: int) -> Reply:
    """Send a request; retry while the server is busy."""
    for attempt in range(tries - 1):
        reply = await answer(line.url, line.body)
        if reply.status_code not in BUSY:
            return reply
        await asyncio.sleep(pause(attempt, reply.retry_after))
    return await answer(line.url, line.body)


def pause(attempt: int, retry_after: float | None) -> float:
    """Return the seconds until the next try; without `retry_after` they double each time."""
    return min(LONGEST_PAUSE, 2.0**attempt if retry_after is None else retry_after)


def _result(custom_id: str, reply: Reply | None, error: dict[str, str] | None) -> str:
    """Return a request's line in the output file."""
    names = ("status_code", "request_id", "body")
    result = {
        "id": f"batch_req_{uuid4().hex}",
        "custom_id": custom_id,
        "response": reply and {name: getattr(reply, name) for name in names},
        "error": error,
    }
    return json.dumps(result, ensure_ascii=False)
