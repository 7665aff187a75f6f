"""Errors for clients, in OpenAI's format; at Anthropic's paths in Anthropic's."""

import math
import re
from collections.abc import Collection, Mapping
from itertools import islice
from typing import Any, Final

from pydantic import ValidationError

from diffray.cluster.control.engine_client import (
    DeadlineExceeded,
    EngineFailed,
    Overloaded,
    Poisonous,
)
from diffray.components.config import InvalidField, field_of, sentence, shortened

Json = dict[str, Any]

_LONGEST: Final = 600  # characters of a message, which may quote megabytes of input
_LONGEST_NAME: Final = 200  # and of a field's name, which the client may have made up
_MOST_NAMES: Final = 10  # of models that a message lists
_ANTHROPIC: Final = re.compile(r"/v1/messages(/|$)")  # the paths of Anthropic's API
_ANTHROPIC_KINDS: Final = {
    401: "authentication_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}
_RETRY_LOST: Final = 2.0  # seconds: about the time to notice that a replica or proxy is lost
_RETRY_FAILED: Final = 5.0  # seconds: about the time to restart an engine's ranks


def no_such_model(name: str, known: Collection[str]) -> "ApiError":
    """Return the error for an unknown model; it lists the first few known ones."""
    shown = ", ".join(f"`{each}`" for each in islice(known, _MOST_NAMES))
    more = f" and {len(known) - _MOST_NAMES} more" if len(known) > _MOST_NAMES else ""
    those = f"this is {shown}" if len(known) == 1 else f"these do: {shown}{more}"
    message = f"The model `{name[:100]}` does not exist; {those}."
    return ApiError(404, message, param="model", code="model_not_found")


class ApiError(Exception):
    """An error with its HTTP status."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        retry_after: float | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        self.status, self.message = status, printable(shortened(message, _LONGEST))
        self.param = None if param is None else printable(shortened(param, _LONGEST_NAME))
        self.code, self.retry_after, self._headers = code, retry_after, dict(headers or {})
        self.counted = False  # whether a model's metrics count it
        super().__init__(status, self.message)  # pickling, for callers of a handle, uses these

    def __str__(self) -> str:
        return self.message

    @property
    def body(self) -> Json:
        kind = "server_error" if self.status >= 500 else "invalid_request_error"
        kind = "rate_limit_error" if self.status == 429 else kind
        error = {"message": self.message, "type": kind, "param": self.param, "code": self.code}
        return {"error": error}

    def body_at(self, path: str) -> Json:
        """Return the body in the format of the path's API; Anthropic's has no `param`."""
        if not _ANTHROPIC.search(path):
            return self.body
        kind = "api_error" if self.status >= 500 else "invalid_request_error"
        named = self.param is None or self.param in self.message
        message = self.message if named else f"{self.param}: {self.message}"
        error = {"type": _ANTHROPIC_KINDS.get(self.status, kind), "message": message}
        return {"type": "error", "error": error}

    @property
    def headers(self) -> dict[str, str]:
        if self.retry_after is None:
            return self._headers
        return self._headers | {"Retry-After": str(max(1, math.ceil(self.retry_after)))}


def printable(text: str) -> str:
    """Return a client's text on one line, with control characters escaped."""
    return "".join(char if char.isprintable() else ascii(char)[1:-1] for char in text)


def invalid(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    """Return the error for an invalid request."""
    return ApiError(400, message, param=param, code=code)


def unsupported(param: str, allowed: str) -> ApiError:
    return invalid(f"{param} is not supported; {allowed}", param, "unsupported_parameter")


def unavailable(message: str) -> ApiError:
    """Return the error while no replica can answer, with a time to retry."""
    return ApiError(503, message, code="engine_unavailable", retry_after=_RETRY_LOST)


def bug() -> ApiError:
    return ApiError(500, "Internal error; see the server's log.", code="internal_error")


def as_api_error(error: Exception) -> ApiError:
    """Return the error for an engine's refusal or failure; re-raise other exceptions."""
    text = str(error)
    match error:
        case ApiError():
            return error
        case Overloaded():
            return ApiError(429, text, code="rate_limit_exceeded", retry_after=error.retry_after)
        case Poisonous():  # not a 5xx, which clients would retry
            return ApiError(422, text, code="request_ends_engine")
        case EngineFailed():
            return ApiError(503, text, code="engine_unavailable", retry_after=_RETRY_FAILED)
        case DeadlineExceeded():
            return ApiError(504, text, code="deadline_exceeded")
        case ValidationError():
            return of_validation(error)
        case InvalidField():
            return invalid(text, error.field)
        case ValueError():
            return invalid(text)
        case _:
            raise error


def of_validation(error: ValidationError) -> ApiError:
    """Return the refusal of a body, naming the first field that is wrong."""
    (first, *_) = error.errors(include_url=False)
    param, code = field_of(error), "invalid_value"
    match first["loc"]:
        case (_,) if first["type"] == "missing":
            code = "missing_required_parameter"
        case ("messages", int(number), str(field), *_):
            param = f"messages[{number}].{field}"
        case ("input", int(number), str(), str(field), *_):  # the item's kind comes in between
            param = f"input[{number}].{field}"
    return invalid(sentence(first), param, code)


def too_long(context: int, reason: str, param: str) -> ApiError:
    """Return the error for a prompt or answer that the context cannot hold."""
    message = f"This model's maximum context length is {context} tokens. However, {reason}"
    return ApiError(400, message, param=param, code="context_length_exceeded")
