"""What a client is told when something cannot be done, shaped as OpenAI shapes it."""

import math
import re
from collections.abc import Mapping
from typing import Any, Final

from pydantic import ValidationError

from diffray.cluster.control.engine_client import (
    DeadlineExceeded,
    EngineFailed,
    Overloaded,
    Poisonous,
)
from diffray.components.config import wrong_kind

_LONGEST: Final = 600  # characters of a message; what was given may be megabytes
_LONGEST_NAME: Final = 200  # and of the field's name, which may be the client's invention
_LONGEST_VALUE: Final = 100
_RETRY_LOST: Final = 2.0  # seconds, about what it takes to find out that a replica or proxy is lost
_RETRY_FAILED: Final = 5.0  # seconds, about what it takes to start an engine's ranks anew
_KINDS: Final = ("iteration", "decoder", "cache")  # of these a place names the kind as well


class ApiError(Exception):
    """A refusal, with its HTTP status."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        kind: str = "invalid_request_error",
        param: str | None = None,
        code: str | None = None,
        retry_after: float | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        message = printable(shortened(message, _LONGEST))
        super().__init__(message)
        self.status, self.message, self.kind = status, message, kind
        self.param = None if param is None else printable(shortened(param, _LONGEST_NAME))
        self.code, self.retry_after, self._headers = code, retry_after, dict(headers or {})

    def __reduce__(self) -> Any:  # it travels to those who ask by a handle
        return _remade, (self.status, self.message, vars(self))

    @property
    def body(self) -> dict[str, Any]:
        return {
            "error": {
                "message": self.message,
                "type": self.kind,
                "param": self.param,
                "code": self.code,
            }
        }

    @property
    def headers(self) -> dict[str, str]:
        if self.retry_after is None:
            return self._headers
        return self._headers | {"Retry-After": str(max(1, math.ceil(self.retry_after)))}


def _remade(status: int, message: str, fields: dict[str, Any]) -> ApiError:
    error = ApiError(status, message)
    vars(error).update(fields)
    return error


def printable(text: str) -> str:
    """Return a text on one line, whatever a client has put into it."""
    return "".join(sign if sign.isprintable() else ascii(sign)[1:-1] for sign in text)


def shortened(text: str, most: int) -> str:
    """Return a text whose middle was left out if it is long."""
    if len(text) <= most:
        return text
    half = (most - 5) // 2
    return f"{text[:half]} ... {text[-half:]}"


def invalid(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    """Return the refusal of a request that has to be changed."""
    return ApiError(400, message, param=param, code=code)


def unsupported(param: str, allowed: str) -> ApiError:
    return invalid(f"{param} is not supported; {allowed}", param, "unsupported_parameter")


def unavailable(message: str) -> ApiError:
    """Return the answer where nobody can answer now, but soon."""
    return ApiError(
        503, message, kind="server_error", code="engine_unavailable", retry_after=_RETRY_LOST
    )


def bug() -> ApiError:
    message = "The server failed to answer; its log says why."
    return ApiError(500, message, kind="server_error", code="internal_error")


def as_api_error(error: Exception) -> ApiError:
    """Return what to tell a client about an engine's refusal or failure; a bug is raised again."""
    match error:
        case ApiError():
            return error
        case Overloaded():
            return ApiError(
                429,
                str(error),
                kind="rate_limit_error",
                code="rate_limit_exceeded",
                retry_after=error.retry_after,
            )
        case Poisonous():  # not a 5xx, after which clients try again
            return ApiError(422, str(error), code="request_ends_engine")
        case EngineFailed():
            return ApiError(
                503,
                str(error),
                kind="server_error",
                code="engine_unavailable",
                retry_after=_RETRY_FAILED,
            )
        case DeadlineExceeded():
            return ApiError(504, str(error), kind="server_error", code="deadline_exceeded")
        case ValidationError():
            return of_validation(error)
        case ValueError():
            return invalid(str(error), _first_word(str(error)))
        case _:
            raise error


def of_validation(error: ValidationError) -> ApiError:
    """Return the refusal of a body, naming the first field that is wrong."""
    mistake = error.errors(include_url=False)[0]
    param = _place(mistake["loc"])
    if mistake["type"] == "union_tag_invalid":
        return invalid(f"{param}: {wrong_kind(mistake['ctx'])}", param, "invalid_value")
    message = mistake["msg"].removeprefix("Value error, ")
    if unknown := re.match(r"unknown option '([^']*)'", message):
        param = f"{param}.{unknown[1]}"
    given = mistake["input"]
    shown = ""
    if isinstance(given, str | int | float | None):
        shown = f" (given: {shortened(repr(given), _LONGEST_VALUE)})"
    return invalid(f"{param}: {message}{shown}", param, "invalid_value")


def _place(loc: tuple[int | str, ...]) -> str:
    """Return the dotted name of a field, without what pydantic says of unions."""
    first, *rest = (str(part) for part in loc)
    if first not in ("diffusion", "stream_options"):
        return first
    if rest and rest[0] in _KINDS:
        del rest[1:2]
    return ".".join([first, *rest])


def _first_word(message: str) -> str | None:
    """Return the field that a message begins with, as in `min_tokens (5) must not exceed`."""
    found = re.match(r"(?:an? |the )?([a-z]+(?:_[a-z]+)+|stop|cache|iteration|suffix)\b", message)
    if found is None:
        return None
    name = found[1]
    return f"diffusion.{name}" if name in (*_KINDS, "cfg_scale", "block_length") else name
