"""A batch's files: requests in OpenAI's format, and the answers of earlier runs."""

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
