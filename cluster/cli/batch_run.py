"""Many requests from a file: OpenAI's batch format in, a line for each answer out.

Answers are written as they come, so whatever ends a batch loses at most those that were under way;
run again, it goes on with the lines that have no answer yet.
"""

import asyncio
import json
from collections.abc import Awaitable, Callable, Iterator
from contextlib import AbstractAsyncContextManager
from dataclasses import asdict, dataclass
from pathlib import Path
from time import monotonic
from typing import IO, Any
from uuid import uuid4

from diffray.cluster.cli.batch_files import Line, check_lines, mend, read_lines
from diffray.cluster.cli.progress import Progress

BUSY = (429, 502, 503, 504)  # worth another try
TRIES = 8
LONGEST_PAUSE = 60.0


@dataclass(frozen=True, slots=True)
class Reply:
    """What came of a request, as HTTP says it."""

    status_code: int
    request_id: str
    body: Any
    retry_after: float | None = None


class Unanswered(Exception):
    """One request got no answer, though the endpoint is there; the message says why."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


# Asks the endpoint or an engine; raises Unanswered for this request alone, ConnectionError where no
# request has a chance any more.
Answer = Callable[[str, dict[str, Any]], Awaitable[Reply]]


@dataclass(slots=True)
class Summary:
    """What a batch did."""

    requests: int
    before: int = 0  # answered in an earlier run
    answered: int = 0
    failed: int = 0
    tokens: int = 0  # written, as the answers' usage says
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


def run_batch(
    source: Path,
    target: Path,
    answering: AbstractAsyncContextManager[Answer],
    *,
    concurrency: int = 64,
    tries: int = TRIES,
    progress: Progress | None = None,
) -> Summary:
    """Answer every line of `source` that has no line in `target` yet; appends to `target`.

    Nothing is sent if a line of `source` is wrong. Ctrl-C ends it with what is there.
    """
    if concurrency < 1:
        raise ValueError(f"concurrency must be at least 1 (given: {concurrency})")
    if target.exists() and target.samefile(source):
        raise ValueError(f"{target} is the input; answers need a file of their own")
    ids = check_lines(source)
    done = mend(target)
    summary = Summary(len(ids), before=len(ids & done))
    if summary.left == 0:
        return summary
    waiting = (line for line in read_lines(source) if line.custom_id not in done)
    shown = progress or Progress(len(ids), summary.before)

    async def run() -> None:
        with target.open("a") as out:
            async with answering as answer:
                batch = _Batch(waiting, answer, out, summary, tries, shown)
                await batch.run(min(concurrency, summary.left))

    begin = monotonic()
    try:
        with shown:
            asyncio.run(run())
    except KeyboardInterrupt:
        summary.interrupted = True
    finally:
        summary.seconds = monotonic() - begin
    return summary


class _Batch:
    """The requests of one run: some at a time, each until it has an answer."""

    def __init__(
        self,
        lines: Iterator[Line],
        answer: Answer,
        out: IO[str],
        summary: Summary,
        tries: int,
        progress: Progress,
    ) -> None:
        self.lines, self.answer, self.out = lines, answer, out
        self.summary, self.tries, self.progress = summary, tries, progress

    async def run(self, concurrency: int) -> None:
        """Work the lines off; the first error that concerns them all ends the batch."""
        try:
            async with asyncio.TaskGroup() as group:
                for _ in range(concurrency):
                    group.create_task(self._work())
        except ExceptionGroup as errors:
            raise errors.exceptions[0] from None

    async def _work(self) -> None:
        for line in self.lines:
            try:
                self._write(line, await self._ask(line), None)
            except Unanswered as error:
                self._write(line, None, {"code": error.code, "message": str(error)})

    async def _ask(self, line: Line) -> Reply:
        """Ask until there is an answer, or as often as is allowed."""
        for attempt in range(self.tries):
            reply = await self.answer(line.url, line.body)
            if reply.status_code not in BUSY or attempt + 1 == self.tries:
                return reply
            await asyncio.sleep(pause(attempt, reply.retry_after))
        raise AssertionError("there is at least one try")

    def _write(self, line: Line, reply: Reply | None, error: dict[str, str] | None) -> None:
        """Write an answer and count it."""
        response = None
        if reply is not None:
            response = asdict(reply)
            del response["retry_after"]
        made = {
            "id": f"batch_req_{uuid4().hex}",
            "custom_id": line.custom_id,
            "response": response,
            "error": error,
        }
        self.out.write(json.dumps(made, ensure_ascii=False) + "\n")
        self.out.flush()
        if reply is not None and reply.status_code == 200:
            self.summary.answered += 1
            self.summary.tokens += _tokens(reply.body)
        else:
            self.summary.failed += 1
        self.progress.one_more(failed=self.summary.failed)


def pause(attempt: int, retry_after: float | None) -> float:
    """Return how long to wait before another try: as told, else twice as long each time."""
    return min(LONGEST_PAUSE, 2.0**attempt if retry_after is None else retry_after)


def _tokens(body: Any) -> int:
    usage = body.get("usage") if isinstance(body, dict) else None
    count = usage.get("completion_tokens") if isinstance(usage, dict) else None
    return count if isinstance(count, int) else 0
