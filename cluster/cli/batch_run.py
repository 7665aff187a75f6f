"""Many requests from a file: OpenAI's batch format in, a line for each answer out.

Answers are written as they come, so an interrupted batch loses only the requests in flight; the
next run continues with the lines that have no answer yet.
"""

import asyncio
import json
import sys
from collections.abc import Awaitable, Callable, Iterator
from contextlib import AbstractAsyncContextManager, closing
from dataclasses import asdict, dataclass
from pathlib import Path
from time import monotonic
from typing import IO, Any, TextIO
from uuid import uuid4

from tqdm import tqdm

from diffray.cluster.cli.batch_files import Line, check_lines, read_lines, repair

BUSY = (429, 502, 503, 504)  # statuses after which a request is sent again
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
    """One request got no answer, though the server is there; the message says why."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


# Sends a request to a server or an engine. It raises Unanswered if only this request failed,
# ConnectionError if all others would fail too.
Answer = Callable[[str, dict[str, Any]], Awaitable[Reply]]


@dataclass(slots=True)
class Summary:
    """What a batch has done."""

    requests: int
    before: int = 0  # answered in an earlier run
    answered: int = 0
    failed: int = 0
    tokens: int = 0  # generated, by the usage in the answers
    seconds: float = 0.0
    interrupted: bool = False

    @property
    def left(self) -> int:
        return self.requests - self.before - self.answered - self.failed

    def __str__(self) -> str:
        noun = "request" if self.requests == 1 else "requests"
        text = f"{self.requests} {noun}: {self.answered} answered, {self.failed} failed"
        if self.before:
            text += f", {self.before} done before"
        if self.left:
            text += f", {self.left} left (run it again to go on)"
        rate = self.tokens / max(self.seconds, 1e-9)
        return text + f"; {self.tokens} tokens, {rate:.1f} tokens/s ({self.seconds:.1f} s)"


class Progress:
    """Shows a batch's progress: a bar on a terminal, else a line now and then."""

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
            disable=None,  # except on a terminal
        )

    def close(self) -> None:
        self._bar.close()

    def show(self) -> None:
        """Show that one more request is done."""
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
    if target.exists() and target.samefile(source):
        raise ValueError(f"{target} is the input; give another file for the answers")
    ids = check_lines(source)
    done = repair(target)
    summary = Summary(len(ids), before=len(ids & done))
    if summary.left == 0:
        return summary
    waiting = (line for line in read_lines(source) if line.custom_id not in done)

    async def run(progress: Progress) -> None:
        with target.open("a") as out:
            async with backend as answer:
                batch = _Batch(waiting, answer, out, summary, tries, progress)
                await batch.run(min(concurrency, summary.left))

    begin = monotonic()
    try:
        with closing(Progress(summary)) as progress:
            asyncio.run(run(progress))
    except KeyboardInterrupt:
        summary.interrupted = True
    finally:
        summary.seconds = monotonic() - begin
    return summary


@dataclass(frozen=True, slots=True)
class _Batch:
    """The requests of one run, several in flight at once."""

    lines: Iterator[Line]
    answer: Answer
    out: IO[str]
    summary: Summary
    tries: int
    progress: Progress

    async def run(self, concurrency: int) -> None:
        """Send all requests; an error that concerns them all ends the batch."""
        try:
            async with asyncio.TaskGroup() as group:
                for _ in range(concurrency):
                    group.create_task(self._work())
        except ExceptionGroup as errors:
            raise errors.exceptions[0] from None

    async def _work(self) -> None:
        for line in self.lines:
            try:
                self._write(line, await self._send(line), None)
            except Unanswered as error:
                self._write(line, None, {"code": error.code, "message": str(error)})

    async def _send(self, line: Line) -> Reply:
        """Send a request, and again while the server is busy."""
        for attempt in range(self.tries - 1):
            reply = await self.answer(line.url, line.body)
            if reply.status_code not in BUSY:
                return reply
            await asyncio.sleep(pause(attempt, reply.retry_after))
        return await self.answer(line.url, line.body)

    def _write(self, line: Line, reply: Reply | None, error: dict[str, str] | None) -> None:
        """Write an answer and count it."""
        response = None
        if reply is not None:
            response = asdict(reply)
            del response["retry_after"]
        result = {
            "id": f"batch_req_{uuid4().hex}",
            "custom_id": line.custom_id,
            "response": response,
            "error": error,
        }
        self.out.write(json.dumps(result, ensure_ascii=False) + "\n")
        self.out.flush()
        if reply is not None and reply.status_code == 200:
            self.summary.answered += 1
            self.summary.tokens += _tokens(reply.body)
        else:
            self.summary.failed += 1
        self.progress.show()


def pause(attempt: int, retry_after: float | None) -> float:
    """Return the seconds before another try; without `retry_after` they double each time."""
    return min(LONGEST_PAUSE, 2.0**attempt if retry_after is None else retry_after)


def _tokens(body: Any) -> int:
    match body:
        case {"usage": {"completion_tokens": int(count)}}:
            return count
    return 0
