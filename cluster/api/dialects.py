"""Other APIs on top of chats: requests become bodies of chats, and answers are translated back.

Nothing else in the server knows about them: a dialect maps JSON objects to JSON objects.
"""

from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Iterator, Mapping
from contextlib import aclosing, contextmanager
from dataclasses import dataclass, field
from typing import Any, ClassVar, Final

from diffray.cluster.api.bodies import ChatBody, SharedFields
from diffray.cluster.api.errors import ApiError, Json
from diffray.cluster.api.served import Served

_PREFIX: Final = "chatcmpl-"  # of a chat's id


@dataclass(slots=True)
class Item:
    """A part of an answer: a text, or a function call with its arguments as JSON text."""

    index: int
    call_id: str = ""
    name: str = ""
    text: str = ""
    logprobs: list[Json] = field(default_factory=list)

    @property
    def is_call(self) -> bool:
        return bool(self.name)


class Dialect(ABC):
    """One request of another API and its answer so far; an object serves one answer."""

    names: ClassVar[Mapping[str, str]]  # a chat's fields -> the API's names

    chat: Json  # the body of the chat

    def __init__(self) -> None:
        self.items: list[Item] = []
        self.id, self.model, self.created = "", "", 0
        self.usage: Json = {}
        self.about: Json = {}  # fields of a chat's answer that the API lacks
        self.warnings: list[str] = []  # about the body, before those of the answer
        self.finish_reason: str | None = None
        self.stop_reason: str | int | None = None

    @abstractmethod
    def result(self) -> Json:
        """Return the answer so far."""

    @abstractmethod
    def failed(self, error: ApiError) -> Json:
        """Return the event that ends a stream with an error."""

    def whole(self, answer: Json) -> Json:
        """Translate a chat's whole answer, read as a stream of one chunk."""
        (choice,) = answer["choices"]
        chunk = answer | {"choices": [choice | {"delta": choice["message"]}]}
        for _ in self.events(chunk):
            pass
        return self.result()

    def events(self, chunk: Json) -> Iterator[Json]:
        """Yield the events for a chunk of the chat's stream."""
        self.usage = chunk.get("usage") or self.usage
        if not self.id:
            self.id = chunk["id"].removeprefix(_PREFIX)
            self.model, self.created = chunk["model"], chunk["created"]
            if told := self.warnings + [self._renamed(each) for each in chunk.get("warnings", ())]:
                self.about["warnings"] = told
            yield from self._opening()
        about = chunk.get("diffusion", {})
        if "canvas" in about:
            yield self._event("diffusion.canvas", **about)
        elif about:
            self.about["diffusion"] = about
        for choice in chunk["choices"]:
            yield from self._choice(choice)

    def _renamed(self, told: str) -> str:
        """Return a warning with the client's name of the field that it begins with, if any."""
        name, space, rest = told.partition(" ")
        return self.names.get(name, name) + space + rest

    @abstractmethod
    def last_events(self) -> Iterator[Json]:
        """Yield the events after those of all chunks."""

    @abstractmethod
    def _event(self, kind: str, **content: Any) -> Json: ...

    @abstractmethod
    def _opening(self) -> Iterator[Json]:
        """Yield the events before the first item."""

    @abstractmethod
    def _opened(self, item: Item) -> Iterator[Json]: ...

    @abstractmethod
    def _grown(self, item: Item, text: str, logprobs: list[Json]) -> Iterator[Json]: ...

    @abstractmethod
    def _closed(self, item: Item) -> Iterator[Json]: ...

    def _choice(self, choice: Json) -> Iterator[Json]:
        delta, logprobs = choice["delta"], (choice["logprobs"] or {}).get("content", [])
        if (text := delta.get("content") or "") or logprobs:
            if not self.items or self.items[-1].is_call:
                yield from self._open(Item(len(self.items)))
            yield from self._grow(text, logprobs)
        for call in delta.get("tool_calls", ()):
            if "id" in call:
                name = call["function"]["name"]
                yield from self._open(Item(len(self.items), call["id"], name))
            if arguments := call["function"].get("arguments"):
                yield from self._grow(arguments, [])
        if choice["finish_reason"] is not None:
            self.finish_reason, self.stop_reason = choice["finish_reason"], choice["stop_reason"]
            if "structured_outputs" in choice:
                self.about["structured_outputs"] = choice["structured_outputs"]
            if not self.items:  # an empty text is an answer too
                yield from self._open(Item(0))
            yield from self._closed(self.items[-1])

    def _open(self, item: Item) -> Iterator[Json]:
        if self.items:
            yield from self._closed(self.items[-1])
        self.items.append(item)
        yield from self._opened(item)

    def _grow(self, text: str, logprobs: list[Json]) -> Iterator[Json]:
        item = self.items[-1]
        item.text += text
        item.logprobs += logprobs
        yield from self._grown(item, text, logprobs)


def shared_fields(given: Json) -> Json:
    """Return the fields of a body that a chat takes unchanged."""
    return {name: given[name] for name in given if name in SharedFields.model_fields}


async def answer_whole(service: Served, dialect: Dialect) -> Json:
    """Return the answer to a request of another API."""
    with _with_client_names(dialect):
        return dialect.whole(await service.whole(ChatBody, dialect.chat))


async def answer_stream(service: Served, dialect: Dialect) -> AsyncGenerator[Json, None]:
    """Yield the events of the answer; closing the generator cancels it."""
    with _with_client_names(dialect):
        async with aclosing(service.stream(ChatBody, dialect.chat)) as chunks:
            async for chunk in chunks:
                for event in dialect.events(chunk):
                    yield event
    for event in dialect.last_events():
        yield event


@contextmanager
def _with_client_names(dialect: Dialect) -> Iterator[None]:
    """In a chat's refusals, replace a field's name by the one that the client used."""
    try:
        yield
    except ApiError as error:
        name, dot, rest = (error.param or "").partition(".")
        if name not in dialect.names:
            raise
        error.param = dialect.names[name] + dot + rest
        if "_" in name:  # other names may be ordinary words
            error.message = error.message.replace(name, dialect.names[name])
        raise
