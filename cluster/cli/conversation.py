"""A conversation with an OpenAI-compatible server, without a terminal."""

import json
from collections.abc import Generator, Iterator
from dataclasses import dataclass, field
from typing import Any

import httpx2

from diffray.cluster.cli.endpoint import Endpoint, Refused, complaint, json_of, message_of
from diffray.cluster.cli.playback import News
from diffray.components.config import counted


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
            yield tokens
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
