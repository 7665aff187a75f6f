"""Errors for clients, in OpenAI's shape."""

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

_LONGEST: Final = 600  # characters of a message; the input may be megabytes
_LONGEST_NAME: Final = 200  # and of the field's name, which the client may have invented
_LONGEST_VALUE: Final = 100
_RETRY_LOST: Final = 2.0  # seconds, about the time to detect a lost replica or proxy
_RETRY_FAILED: Final = 5.0  # seconds, about the time to restart an engine's ranks
_KINDS: Final = ("iteration", "decoder", "cache")  # for these a place includes the kind


class ApiError(Exception):
    """An error with its HTTP status."""

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

    def __reduce__(self) -> Any:  # it is sent to callers of a handle
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
    """Return a client's text on one line, with control characters escaped."""
    return "".join(sign if sign.isprintable() else ascii(sign)[1:-1] for sign in text)


def shortened(text: str, most: int) -> str:
    """Return a text, without its middle if it is long."""
    if len(text) <= most:
        return text
    half = (most - 5) // 2
    return f"{text[:half]} ... {text[-half:]}"


def invalid(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    """Return the error for an invalid request."""
    return ApiError(400, message, param=param, code=code)


def unsupported(param: str, allowed: str) -> ApiError:
    return invalid(f"{param} is not supported; {allowed}", param, "unsupported_parameter")


def unavailable(message: str) -> ApiError:
    """Return the error while no replica can answer, with a time to retry."""
    return ApiError(
        503, message, kind="server_error", code="engine_unavailable", retry_after=_RETRY_LOST
    )


def bug() -> ApiError:
    message = "The server failed to answer; its log says why."
    return ApiError(500, message, kind="server_error", code="internal_error")


def as_api_error(error: Exception) -> ApiError:
    """Return the error for an engine's refusal or failure; other exceptions are raised again."""
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
        case Poisonous():  # not a 5xx, after which clients retry
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
    """Return the error for an invalid body, naming the first wrong field."""
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
    """Return the dotted name of a field, without pydantic's names of unions."""
    first, *rest = (str(part) for part in loc)
    if first not in ("diffusion", "stream_options"):
        return first
    if rest and rest[0] in _KINDS:
        del rest[1:2]
    return ".".join([first, *rest])


def _first_word(message: str) -> str | None:
    """Return the field at the start of a message, as in `min_tokens (5) must not exceed`."""
    found = re.match(r"(?:an? |the )?([a-z]+(?:_[a-z]+)+|stop|cache|iteration|suffix)\b", message)
    if found is None:
        return None
    name = found[1]
    return f"diffusion.{name}" if name in (*_KINDS, "cfg_scale", "block_length") else name
