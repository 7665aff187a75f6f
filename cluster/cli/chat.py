"""A conversation with an OpenAI-compatible server in the terminal.

Without a terminal each line of the input is a message, and only the answers are written.
"""

import json
import sys
from collections.abc import Generator, Iterator, Mapping
from contextlib import closing, suppress
from dataclasses import dataclass, field
from typing import Any, TextIO

import httpx2

from diffray.cluster.cli.endpoint import Endpoint, Refused, complaint, json_of, message_of
from diffray.components.checkpoints.demos import DEMOS, EXAMPLE, TOY

ANSWER_SECONDS = 300.0  # between two pieces of an answer
HELP = """/system TEXT   set the system message; without TEXT, remove it
/clear         forget the conversation
/exit          leave, as Ctrl-D does; Ctrl-C stops an answer"""
# They would let an answer move the cursor.
_CONTROLS = dict.fromkeys({*range(32), *range(127, 160)} - {ord("\n"), ord("\t")}, " ")


@dataclass(slots=True)
class Conversation:
    """The messages so far, and the server that answers them."""

    client: httpx2.Client
    endpoint: Endpoint
    model: str
    options: Mapping[str, object]
    system: str | None
    turns: list[dict[str, str]] = field(default_factory=list)
    finish_reason: str | None = None  # of the last answer

    def ask(self, text: str) -> Generator[str, None, None]:
        """Yield the answer as it comes.

        An answer that is stopped stays in the conversation as far as it came; a message without
        any answer does not.
        """
        self.turns.append({"role": "user", "content": text})
        first = [{"role": "system", "content": self.system}] if self.system else []
        body = {"model": self.model, "messages": first + self.turns, "stream": True}
        pieces: list[str] = []
        self.finish_reason = None
        try:
            with self.client.stream(
                "POST", "/v1/chat/completions", json={**self.options, **body}
            ) as response:
                if response.status_code != 200:
                    response.read()
                    raise Refused(complaint(json_of(response), response.status_code))
                for chunk in _chunks(response):
                    choice = (chunk.get("choices") or [{}])[0]
                    self.finish_reason = choice.get("finish_reason") or self.finish_reason
                    if piece := choice.get("delta", {}).get("content"):
                        pieces.append(piece)
                        yield piece
        except httpx2.TransportError as error:
            raise self.endpoint.failure(error, self.client) from None
        finally:
            if pieces:
                self.turns.append({"role": "assistant", "content": "".join(pieces)})
            else:
                self.turns.pop()


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
    source, out, options = source or sys.stdin, out or sys.stdout, options or {}
    if options.get("n", 1) != 1:
        raise ValueError(f"a chat shows one answer; leave n out (given: {options['n']!r:.99})")
    with httpx2.Client(**endpoint.options(ANSWER_SECONDS)) as client:
        model = model or endpoint.first_model(client)
        talk = Conversation(client, endpoint, model, options, system)
        if source.isatty() and out.isatty():
            with suppress(ImportError):
                import readline  # noqa: F401  # gives input() its editing and history
            out.write(f"{talk.model} at {endpoint.url}; /help lists commands, Ctrl-D leaves\n")
            if talk.model in DEMOS:
                out.write(f"{talk.model} {TOY}. One is:\n  {EXAMPLE}\n")
            _converse(talk, out)
        else:
            with suppress(_Leave):
                for line in map(str.strip, source):
                    if line and not _command(talk, line, out):
                        _answer(talk, line, out)


def _converse(talk: Conversation, out: TextIO) -> None:
    """Read and answer messages; an error or Ctrl-C ends only its turn."""
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
    """The user typed /exit."""


def _answer(talk: Conversation, line: str, out: TextIO) -> None:
    shown = _CONTROLS if out.isatty() else {}
    with closing(talk.ask(line)) as pieces:
        for piece in pieces:
            out.write(piece.translate(shown))
            out.flush()
    out.write("\n")
    out.flush()


def _command(talk: Conversation, line: str, out: TextIO) -> bool:
    """Run a line that starts with a slash; return False if it is a message."""
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
            raise Refused(f"there is no command {name}; /help lists them")
    return True
