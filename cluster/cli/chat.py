"""A conversation in the terminal with an OpenAI-compatible endpoint.

Without a terminal each line of the input is a message, and only the answers are written.
"""

import json
import sys
from collections.abc import Generator, Iterator, Mapping
from contextlib import closing, suppress
from typing import Any, TextIO

import httpx2

from diffray.cluster.cli.endpoint import Endpoint, complaint, json_of, message_of
from diffray.components.checkpoints.demos import DEMOS, EXAMPLE, TOY

ANSWER_SECONDS = 300.0  # between two pieces of an answer
HELP = """/system TEXT   say how to answer, from now on; without TEXT: no more
/clear         forget the conversation
/exit          leave, as Ctrl-D does; Ctrl-C stops an answer"""
# They would let an answer move the cursor.
_CONTROLS = dict.fromkeys({*range(32), *range(127, 160)} - {ord("\n"), ord("\t")}, " ")


class Refused(ValueError):
    """The endpoint refuses a request, or breaks off its answer; the message says why."""


class Conversation:
    """The messages so far, and the endpoint that answers them."""

    def __init__(
        self,
        client: httpx2.Client,
        endpoint: Endpoint,
        model: str | None = None,
        options: Mapping[str, object] | None = None,
        system: str | None = None,
    ) -> None:
        self._client, self._endpoint = client, endpoint
        self.options, self.system = dict(options or {}), system
        if self.options.get("n", 1) != 1:
            raise ValueError(
                f"a chat shows one answer; leave n out (given: {self.options['n']!r:.99})"
            )
        self.model = model or self._first_model()
        self.turns: list[dict[str, str]] = []
        self.finish_reason: str | None = None  # of the last answer

    def ask(self, text: str) -> Generator[str, None, None]:
        """Yield the answer as it comes.

        The conversation keeps what was yielded, also when it is stopped there; it forgets a
        message that got no answer at all.
        """
        self.turns.append({"role": "user", "content": text})
        pieces: list[str] = []
        try:
            with closing(self._stream()) as stream:
                for piece in stream:
                    pieces.append(piece)
                    yield piece
        finally:
            if pieces:
                self.turns.append({"role": "assistant", "content": "".join(pieces)})
            else:
                self.turns.pop()

    def _stream(self) -> Generator[str, None, None]:
        first = [{"role": "system", "content": self.system}] if self.system else []
        body = {"model": self.model, "messages": first + self.turns, "stream": True}
        self.finish_reason = None
        try:
            with self._client.stream(
                "POST", "/v1/chat/completions", json={**self.options, **body}
            ) as response:
                if response.status_code != 200:
                    response.read()
                    raise Refused(complaint(json_of(response), response.status_code))
                for chunk in _chunks(response):
                    choice = (chunk.get("choices") or [{}])[0]
                    self.finish_reason = choice.get("finish_reason") or self.finish_reason
                    if piece := choice.get("delta", {}).get("content"):
                        yield piece
        except httpx2.TransportError as error:
            raise self._broken(error) from None

    def _first_model(self) -> str:
        try:
            response = self._client.get("/v1/models")
        except httpx2.TransportError as error:
            raise self._broken(error) from None
        found = json_of(response)
        if response.status_code != 200:
            raise Refused(complaint(found, response.status_code))
        try:
            return str(found["data"][0]["id"])  # type: ignore[index]  # what else it is, is said
        except (LookupError, TypeError):
            raise Refused(f"{self._endpoint.url}/v1/models lists no model; give --model") from None

    def _broken(self, error: httpx2.TransportError) -> Exception:
        if isinstance(error, httpx2.ConnectError | httpx2.ConnectTimeout):
            return self._endpoint.unreachable()
        if isinstance(error, httpx2.TimeoutException):
            return Refused(f"the server has been silent for {ANSWER_SECONDS:g} s")
        return Refused(f"the connection broke: {str(error) or type(error).__name__}")


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


def chat(
    endpoint: Endpoint,
    *,
    model: str | None = None,
    options: Mapping[str, object] | None = None,
    system: str | None = None,
    source: TextIO | None = None,
    out: TextIO | None = None,
) -> None:
    """Converse until the input ends; `options` go into the body of every request."""
    source, out = source or sys.stdin, out or sys.stdout
    with httpx2.Client(**endpoint.options(ANSWER_SECONDS)) as client:
        talk = Conversation(client, endpoint, model, options, system)
        if source.isatty() and out.isatty():
            with suppress(ImportError):
                import readline  # noqa: F401  # gives input() its editing and history
            out.write(f"{talk.model} at {endpoint.url}; /help says more, Ctrl-D leaves\n")
            if talk.model in DEMOS:
                out.write(f"{talk.model} {TOY}. One is:\n  {EXAMPLE}\n")
            _converse(talk, out)
        else:
            with suppress(_Leave):
                for line in source:
                    if line.strip() and not _command(talk, line.strip(), out):
                        _answer(talk, line.strip(), out)


def _converse(talk: Conversation, out: TextIO) -> None:
    """Ask and answer in turns; what goes wrong with one turn does not end the conversation."""
    while True:
        try:
            line = input("> ").strip()
        except EOFError:
            out.write("\n")
            return
        except KeyboardInterrupt:
            out.write("\n")
            continue
        try:
            if line and not _command(talk, line, out):
                _answer(talk, line, out)
                if talk.finish_reason == "length":
                    out.write("(max_tokens ended the answer)\n")
        except KeyboardInterrupt:
            out.write("\n(stopped)\n")
        except (Refused, ConnectionError) as error:
            out.write(f"diffray: {error}\n")
        except _Leave:
            return


class _Leave(Exception):
    """The user wants to go."""


def _answer(talk: Conversation, text: str, out: TextIO) -> None:
    shown = _CONTROLS if out.isatty() else {}
    with closing(talk.ask(text)) as pieces:
        for piece in pieces:
            out.write(piece.translate(shown))
            out.flush()
    out.write("\n")
    out.flush()


def _command(talk: Conversation, line: str, out: TextIO) -> bool:
    """Do what a line that begins with a slash says; False if it is a message."""
    if not line.startswith("/"):
        return False
    name, _, rest = line.partition(" ")
    match name:
        case "/exit" | "/quit":
            raise _Leave
        case "/clear":
            talk.turns.clear()
        case "/system":
            talk.system = rest.strip() or None
        case "/help":
            out.write(HELP + "\n")
        case _:
            raise Refused(f"there is no {name}; /help lists what there is")
    return True
