"""A batch's files: requests in OpenAI's format, and the answers that are there already."""

import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from diffray.components.config import Config

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
    """Yield the requests of a file that has been checked."""
    for _, text in _texts(source):
        yield _line(text)


def check_lines(source: Path) -> set[str]:
    """Return the ids of all requests, or say which lines are wrong and why."""
    ids: dict[str, int] = {}
    mistakes = []
    for number, text in _texts(source):
        try:
            line = _line(text)
            if line.custom_id in ids:
                raise ValueError(
                    f"the custom_id {line.custom_id!r} is line {ids[line.custom_id]}'s already"
                )
            ids[line.custom_id] = number
        except ValueError as error:
            mistakes.append(f"line {number}: {error}")
    if mistakes:
        more = len(mistakes) - SHOWN_MISTAKES
        told = "; ".join(mistakes[:SHOWN_MISTAKES]) + (f"; and {more} more" if more > 0 else "")
        raise ValueError(f"{source}: {told}")
    if not ids:
        raise ValueError(f"{source} holds no request")
    return set(ids)


def mend(target: Path) -> set[str]:
    """Return the ids that have a line in `target`; cuts off a last line that was not finished."""
    if not target.exists():
        return set()
    ids = set()
    with target.open("rb+") as file:
        whole = 0  # bytes
        for number, text in enumerate(file, start=1):
            if not text.endswith(b"\n"):
                log.warning("%s: the last line was not finished; it is written anew", target)
                file.truncate(whole)
                break
            whole += len(text)
            try:
                ids.add(str(json.loads(text)["custom_id"]))
            except (ValueError, KeyError, TypeError):
                raise ValueError(
                    f"{target}, line {number} is no answer of a batch; give another output"
                ) from None
    return ids


def _texts(source: Path) -> Iterator[tuple[int, bytes]]:
    with source.open("rb") as file:
        yield from ((number, text) for number, text in enumerate(file, 1) if text.strip())


def _line(text: bytes) -> Line:
    try:
        given = json.loads(text)
    except ValueError as error:
        raise ValueError(f"this is no JSON: {error}") from None
    if not isinstance(given, dict):
        raise ValueError("expected an object with custom_id, method, url and body")
    line = Line(**given)
    if line.body.get("stream"):
        raise ValueError("body.stream: a batch cannot stream; leave it out")
    return line
