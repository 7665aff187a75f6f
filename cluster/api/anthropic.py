"""The dialect of Anthropic's Messages API; a stream has its events."""

import json
from collections.abc import Iterator
from typing import Any, ClassVar, Final

from diffray.cluster.api.anthropic_body import MessagesBody
from diffray.cluster.api.dialects import Dialect, Item, shared_fields
from diffray.cluster.api.errors import ApiError, Json
from diffray.cluster.api.fields import parse

PATH: Final = "/v1/messages"


class Messages(Dialect):
    names: ClassVar = {"stop": "stop_sequences", "response_format": "output_config.format"}

    def __init__(self, given: Any) -> None:
        super().__init__()
        self.body = parse(MessagesBody, given)
        self.chat = shared_fields(given) | self.body.for_chat()

    def result(self) -> Json:
        return {
            "id": f"msg_{self.id}",
            "type": "message",
            "role": "assistant",
            "model": self.model,
            "content": [_block(item, _input(item)) for item in self.items],
            **self._reason(),
            "usage": self._usage(),
            **self.about,
        }

    def failed(self, error: ApiError) -> Json:
        return error.body_at(PATH)

    def last_events(self) -> Iterator[Json]:
        yield self._event("message_delta", delta=self._reason(), usage=self._usage(), **self.about)
        yield self._event("message_stop")

    def _event(self, kind: str, **content: Any) -> Json:
        return {"type": kind, **content}

    def _opening(self) -> Iterator[Json]:
        start = self.result()
        start["usage"]["output_tokens"] = 0
        yield self._event("message_start", message=start)
        yield self._event("ping")

    def _opened(self, item: Item) -> Iterator[Json]:
        block = _block(item, {})
        yield self._event("content_block_start", index=item.index, content_block=block)

    def _grown(self, item: Item, text: str, logprobs: list[Json]) -> Iterator[Json]:
        delta = {"type": "text_delta", "text": text}
        if item.is_call:
            delta = {"type": "input_json_delta", "partial_json": text}
        yield self._event("content_block_delta", index=item.index, delta=delta)

    def _closed(self, item: Item) -> Iterator[Json]:
        yield self._event("content_block_stop", index=item.index)

    def _reason(self) -> Json:
        """Return why the answer ended, and the stop sequence that ended it, if one did."""
        stopped = self.stop_reason if isinstance(self.stop_reason, str) else None
        reason: str | None = "end_turn"
        if self.finish_reason is None:
            reason = None
        elif self.finish_reason == "length":
            reason = "max_tokens"
        elif stopped is not None:
            reason = "stop_sequence"
        elif any(item.is_call for item in self.items):
            reason = "tool_use"
        return {"stop_reason": reason, "stop_sequence": stopped}

    def _usage(self) -> Json:
        """Return the tokens so far; cached and computed tokens of the input are counted apart."""
        details = {**self.usage["prompt_tokens_details"]}
        cached = details.pop("cached_tokens")
        return {
            "input_tokens": self.usage["prompt_tokens"] - cached,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": cached,
            "output_tokens": self.usage["completion_tokens"],
            **details,
        }


def _block(item: Item, given: Json) -> Json:
    if not item.is_call:
        return {"type": "text", "text": item.text}
    called = item.call_id.replace("call_", "toolu_", 1)
    return {"type": "tool_use", "id": called, "name": item.name, "input": given}


def _input(item: Item) -> Json:
    """Return a call's input; empty if a stop sequence cut it off."""
    try:
        made: Json = json.loads(item.text)
    except ValueError:
        return {}
    return made
