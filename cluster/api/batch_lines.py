"""The lines of a batch in OpenAI's format: requests are checked, sent, and become answers."""

import asyncio
import json
from collections.abc import Awaitable, Callable, Iterator, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple
from uuid import uuid4

from pydantic import Field

from diffray.cluster.api.http import parse_json
from diffray.components.config import Config

CHAT: Final = "/v1/chat/completions"
TRIES: Final = 8
BUSY: Final = (429, 502, 503, 504)  # statuses on which a request is retried
LONGEST_PAUSE: Final = 60.0
MOST_MISTAKES: Final = 100


class Line(Config):
    """One request of a batch."""

    custom_id: str = Field(min_length=1)
    method: Literal["POST"]
    url: Literal["/v1/chat/completions", "/v1/completions"]
    body: dict[str, Any]


class Mistake(NamedTuple):
    """What is wrong with a line, or with the file."""

    line: int | None
    message: str

    def __str__(self) -> str:
        return self.message if self.line is None else f"line {self.line}: {self.message}"


def read_lines(source: Path) -> Iterator[Line]:
    """Yield the requests of a file that passed `check_lines`."""
    for _, text in _texts(source):
        yield _line(text)


def check_lines(
    source: Path, check: Callable[[Line, int], None] = lambda line, size: None
) -> tuple[Set[str], list[Mistake]]:
    """Return the ids of all requests in their order, and the first mistakes in the others.

    `check` is given each line and its bytes, and raises ValueError for what else is wrong.
    """
    ids: dict[str, int] = {}
    mistakes: list[Mistake] = []
    for number, text in _texts(source):
        try:
            line = _line(text)
            check(line, len(text))
            if (name := line.custom_id) in ids:
                raise ValueError(f"custom_id {name!r} is already used in line {ids[name]}")
            ids[name] = number
        except ValueError as error:
            mistakes.append(Mistake(number, str(error)))
            if len(mistakes) == MOST_MISTAKES:
                break
    if not ids and not mistakes:
        mistakes.append(Mistake(None, "the file has no requests"))
    return ids.keys(), mistakes


def _texts(source: Path) -> Iterator[tuple[int, bytes]]:
    with source.open("rb") as file:
        yield from ((number, text) for number, text in enumerate(file, 1) if text.strip())


def _line(text: bytes) -> Line:
    try:
        given = parse_json(text.decode("utf-8-sig"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"not valid JSON: {error}") from None
    if not isinstance(given, dict):
        raise ValueError("expected an object with custom_id, method, url and body")
    line = Line(**given)
    if line.body.get("stream"):
        raise ValueError("body.stream: a batch cannot stream; leave it out")
    return line


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

# Takes a line of the answers, and the reply in it, if any.
Done = Callable[[str, Reply | None], None]


async def answer_lines(
    lines: Iterator[Line],
    answer: Answer,
    done: Done,
    concurrency: int,
    tries: int = TRIES,
) -> None:
    """Send all requests; an error that affects all of them is raised."""

    async def work() -> None:
        for line in lines:
            reply = error = None
            try:
                reply = await _send(answer, line, tries)
            except Unanswered as reason:
                error = {"code": reason.code, "message": str(reason)}
            done(answer_line(line.custom_id, reply, error), reply)

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


def answer_line(custom_id: str, reply: Reply | None, error: dict[str, str] | None) -> str:
    """Return a request's line of the answers."""
    names = ("status_code", "request_id", "body")
    result = {
        "id": f"batch_req_{uuid4().hex}",
        "custom_id": custom_id,
        "response": reply and {name: getattr(reply, name) for name in names},
        "error": error,
    }
    return json.dumps(result, ensure_ascii=False)
