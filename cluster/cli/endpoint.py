"""An OpenAI-compatible endpoint as a client sees it: its address, its key, how it says no."""

import json
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import httpx2

CONNECT_SECONDS = 10.0


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Where it is, without the /v1 that paths begin with."""

    url: str
    api_key: str | None = None

    @staticmethod
    def at(base_url: str, api_key: str | None = None) -> "Endpoint":
        """Return the endpoint of an address with or without /v1 at its end."""
        try:
            parts = urlsplit(base_url)
            known = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
        except ValueError:
            known = False
        if not known:
            raise ValueError(f"expected a URL such as http://127.0.0.1:8000 (given: {base_url!r})")
        if parts.query or parts.fragment:
            raise ValueError(f"{base_url!r}: leave out what follows the path")
        return Endpoint(base_url.rstrip("/").removesuffix("/v1"), api_key)

    def options(self, timeout: float | None) -> dict[str, Any]:
        """Return what httpx clients of it are made with; `timeout` bounds each wait for bytes."""
        headers = {"Authorization": f"Bearer {self.api_key}"} if self.api_key else {}
        limit = httpx2.Timeout(timeout, connect=CONNECT_SECONDS)
        pool = httpx2.Limits(max_connections=None)
        return {"base_url": self.url, "headers": headers, "timeout": limit, "limits": pool}

    def unreachable(self) -> ConnectionError:
        """Return the error to raise where nothing answers."""
        return ConnectionError(
            f"nothing answers at {self.url}; start a server with `diffray serve`, "
            "or give another --base-url"
        )


def retry_after(response: httpx2.Response) -> float | None:
    """Return the seconds after which a refused client may come back, if it says so in seconds."""
    try:
        return max(0.0, float(response.headers["retry-after"]))
    except (KeyError, ValueError):
        return None


def json_of(response: httpx2.Response) -> object:
    """Return what was answered; a text that is no JSON stays a text."""
    try:
        return response.json()
    except ValueError:
        return response.text


def message_of(answer: object) -> str:
    """Return the sentence in an error's answer, whoever sent it."""
    error = answer.get("error", answer) if isinstance(answer, dict) else answer
    message = error.get("message", error) if isinstance(error, dict) else error
    text = message if isinstance(message, str) else json.dumps(message)
    return text.strip() or "it does not say why"


def complaint(answer: object, status: int) -> str:
    """Return what to tell of a refusal."""
    key = " (here: --api-key KEY, or the variable DIFFRAY_API_KEY)" if status == 401 else ""
    return f"the server answers {status}: {message_of(answer)}{key}"
