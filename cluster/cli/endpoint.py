"""An OpenAI-compatible server as its clients see it: URL, API key, models, errors, a chat."""

import json
from collections.abc import Generator, Iterator
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

import httpx2

from diffray.cluster.cli.playback import News
from diffray.cluster.frontend.output import Canvas
from diffray.components.config import counted, shortened

CONNECT_SECONDS = 10.0
_LONGEST = 500  # characters of a reason: what is no model's server may answer with a page


class Refused(ValueError):
    """The server refuses a request or breaks off its answer; the message says why."""


@dataclass(frozen=True, slots=True)
class Endpoint:
    """A server's URL, without the /v1 that paths start with, and the key it requires."""

    url: str
    api_key: str | None = None

    @staticmethod
    def at(base_url: str, api_key: str | None = None) -> "Endpoint":
        """Return the endpoint of a URL with or without /v1 at its end."""
        try:
            parts = urlsplit(base_url)
            valid = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
        except ValueError:
            valid = False
        if not valid:
            raise ValueError(f"expected a URL such as http://127.0.0.1:8000 (given: {base_url!r})")
        if parts.query or parts.fragment:
            raise ValueError(f"{base_url!r}: leave out what follows the path")
        return Endpoint(base_url.rstrip("/").removesuffix("/v1"), api_key)

    def options(self, timeout: float | None) -> dict[str, Any]:
        """Return the options of an httpx client; `timeout` bounds each wait for bytes."""
        headers = {"Authorization": f"Bearer {self.api_key}"} if self.api_key else {}
        limit = httpx2.Timeout(timeout, connect=CONNECT_SECONDS)
        pool = httpx2.Limits(max_connections=None)
        return {"base_url": self.url, "headers": headers, "timeout": limit, "limits": pool}

    def models(self, client: httpx2.Client) -> list[dict[str, Any]]:
        """Return the server's entries for its models; raise if it lists none."""
        try:
            response = client.get("/v1/models")
        except httpx2.TransportError as error:
            raise self.failure(error, client) from None
        found = json_of(response)
        if response.status_code != 200:
            raise Refused(complaint(found, response.status_code))
        listed = found.get("data") if isinstance(found, dict) else None
        entries = listed if isinstance(listed, list) else []
        models = [each for each in entries if isinstance(each, dict) and "id" in each]
        if not models:
            raise Refused(f"{self.url}/v1/models lists no model; give --model NAME")
        return models

    def first_model(self, client: httpx2.Client) -> str:
        """Return the name of the first model that the server lists."""
        return str(self.models(client)[0]["id"])

    def unreachable(self) -> ConnectionError:
        """Return the error to raise if no connection can be made."""
        return ConnectionError(
            f"nothing answers at {self.url}; start a server with `diffray serve`, "
            "or give another --base-url"
        )

    def failure(self, error: httpx2.TransportError, client: httpx2.Client) -> Exception:
        """Return the error to raise instead of httpx's."""
        if isinstance(error, httpx2.ConnectError | httpx2.ConnectTimeout):
            return self.unreachable()
        if isinstance(error, httpx2.TimeoutException):
            return Refused(f"the server has sent nothing for {client.timeout.read:g} s")
        return Refused(f"the connection broke: {reason(error)}")


def reason(error: Exception) -> str:
    return str(error) or type(error).__name__


def retry_after(response: httpx2.Response) -> float | None:
    """Return the seconds after which to retry a refused request, if the server names them."""
    try:
        return max(0.0, float(response.headers["retry-after"]))
    except (KeyError, ValueError):
        return None


def json_of(response: httpx2.Response) -> object:
    """Return the JSON of a response; its text if it is not JSON."""
    try:
        return response.json()
    except ValueError:
        return response.text


def message_of(answer: object) -> str:
    """Return the message in an error's body, whatever its form."""
    error = answer.get("error", answer) if isinstance(answer, dict) else answer
    message = error.get("message", error) if isinstance(error, dict) else error
    text = message if isinstance(message, str) else json.dumps(message)
    return shortened(" ".join(text.split()), _LONGEST) or "no reason given"


def complaint(answer: object, status: int) -> str:
    """Return the message to print for a refused request."""
    key = " (give --api-key KEY, or set DIFFRAY_API_KEY)" if status == 401 else ""
    return f"the server answers {status}: {message_of(answer)}{key}"


@dataclass(slots=True)
class Conversation:
    """The messages so far, and the server that answers them.

    `options` go into the body of every request. With `watch` the server sends the canvas after
    every step, which only diffray's servers support.
    """

    client: httpx2.Client
    endpoint: Endpoint
    model: str
    options: dict[str, Any]
    system: str | None = None
    watch: bool = False
    default_policy: dict[str, Any] = field(default_factory=dict)  # as the server reports it
    accepts: dict[str, Any] = field(default_factory=dict)  # the kinds of parts that the model takes
    turns: list[dict[str, str]] = field(default_factory=list)
    unanswered: str | None = None  # the last message, if it has no answer
    finish_reason: str | None = None  # of the last answer
    counts: str = ""  # the server's counts for the last answer

    def ask(self, text: str) -> Generator[News, None, None]:
        """Yield the answer as it arrives.

        A stopped answer stays in the conversation as far as it got; a message without any answer
        does not.
        """
        self.turns.append({"role": "user", "content": text})
        self.unanswered = text
        body = self.request() | {"stream": True}
        if self.watch:
            body["stream_options"] = {"include_canvas": True, "include_usage": True}
        pieces: list[str] = []
        self.finish_reason, self.counts = None, ""
        try:
            with self.client.stream("POST", "/v1/chat/completions", json=body) as response:
                if response.status_code != 200:
                    response.read()
                    raise Refused(complaint(json_of(response), response.status_code))
                for chunk in _chunks(response):
                    for news in self._news(chunk):
                        if isinstance(news, str):
                            pieces.append(news)
                        yield news
        except httpx2.TransportError as error:
            raise self.endpoint.failure(error, self.client) from None
        finally:
            if pieces:
                self.turns.append({"role": "assistant", "content": "".join(pieces)})
                self.unanswered = None
            else:
                self.turns.pop()

    def retry(self) -> Generator[News, None, None]:
        """Ask the last message again; keep its old answer if no new one arrives."""
        kept = self.turns
        if self.unanswered is not None:
            yield from self.ask(self.unanswered)
            return
        if not kept:
            raise Refused("nothing was asked yet")
        *self.turns, question, _ = kept
        try:
            yield from self.ask(question["content"])
        finally:
            if len(self.turns) < len(kept):
                self.turns, self.unanswered = kept, None

    def clear(self) -> None:
        """Forget all messages."""
        self.turns.clear()
        self.unanswered = None

    def try_options(self, options: dict[str, Any]) -> None:
        """Use other options if the server accepts them; else raise its error message.

        This requests an answer with them, and does not read it.
        """
        messages = [{"role": "user", "content": "Hello"}]
        body = {**options, "model": self.model, "messages": messages, "stream": True}
        try:
            with self.client.stream("POST", "/v1/chat/completions", json=body) as response:
                if response.status_code == 400:
                    response.read()
                    raise Refused(complaint(json_of(response), 400))
        except httpx2.TransportError as error:
            raise self.endpoint.failure(error, self.client) from None
        self.options = options

    def request(self) -> dict[str, Any]:
        """Return the body of a request for the next answer."""
        first = [{"role": "system", "content": self.system}] if self.system else []
        return {**self.options, "model": self.model, "messages": first + self.turns}

    def _news(self, chunk: dict[str, Any]) -> Iterator[News]:
        about, usage = chunk.get("diffusion") or {}, chunk.get("usage")
        if tokens := about.get("tokens"):
            yield Canvas(tokens, about.get("drafts", 0))
        elif usage and "forwards" in about:
            forwards, rate = about["forwards"], about["tokens_per_forward"]
            self.counts = (
                f"{counted(usage['completion_tokens'], 'token')}, {counted(forwards, 'forward')}, "
                f"{rate:.2f} tokens per forward"
            )
        choice = (chunk.get("choices") or [{}])[0]
        self.finish_reason = choice.get("finish_reason") or self.finish_reason
        if piece := choice.get("delta", {}).get("content"):
            yield piece


def _chunks(response: httpx2.Response) -> Iterator[dict[str, Any]]:
    """Yield the objects of a stream of server-sent events."""
    for line in response.iter_lines():
        name, _, value = line.partition(":")
        if name != "data":
            continue
        if value.strip() == "[DONE]":
            return
        try:
            chunk = json.loads(value)
        except ValueError:
            chunk = value
        if not isinstance(chunk, dict) or "error" in chunk:
            raise Refused(f"the answer broke off: {message_of(chunk)}")
        yield chunk
    raise Refused("the answer broke off")
