"""The dialect of OpenAI's Responses API; a stream has its typed events."""

import time
from collections.abc import Iterator
from typing import Any, ClassVar

from diffray.cluster.api.dialects import Dialect, Item, shared_fields
from diffray.cluster.api.errors import ApiError, Json
from diffray.cluster.api.fields import parse
from diffray.cluster.api.responses_body import ResponsesBody


class Responses(Dialect):
    names: ClassVar = {
        "messages": "input",
        "max_tokens": "max_output_tokens",
        "max_completion_tokens": "max_output_tokens",
        "response_format": "text.format",
    }

    def __init__(self, given: Any) -> None:
        super().__init__()
        self.body = parse(ResponsesBody, given)
        self.chat = shared_fields(given) | self.body.for_chat()
        self._sent = 0  # events

    def result(self) -> Json:
        status = "in_progress"
        if self.finish_reason is not None:
            status = "incomplete" if self.finish_reason == "length" else "completed"
        return self._response(status)

    def failed(self, error: ApiError) -> Json:
        code = "rate_limit_exceeded" if error.status == 429 else "server_error"
        response = self._response("failed") | {"error": {"code": code, "message": error.message}}
        for item in response["output"][-1:]:
            item["status"] = "incomplete"
        return self._event("response.failed", response=response)

    def last_events(self) -> Iterator[Json]:
        result = self.result()
        yield self._event(f"response.{result['status']}", response=result)

    def _event(self, kind: str, **content: Any) -> Json:
        self._sent += 1
        return {"type": kind, **content, "sequence_number": self._sent - 1}

    def _opening(self) -> Iterator[Json]:
        for kind in ("created", "in_progress"):
            yield self._event(f"response.{kind}", response=self._response("in_progress"))

    def _opened(self, item: Item) -> Iterator[Json]:
        at, made = item.index, self._item(item, "in_progress")
        if item.is_call:
            yield self._event("response.output_item.added", output_index=at, item=made)
            return
        made["content"] = []
        yield self._event("response.output_item.added", output_index=at, item=made)
        yield self._within(item, "response.content_part.added", part=_part(item))

    def _grown(self, item: Item, text: str, logprobs: list[Json]) -> Iterator[Json]:
        if item.is_call:
            yield self._within(item, "response.function_call_arguments.delta", delta=text)
        else:
            yield self._within(item, "response.output_text.delta", delta=text, logprobs=logprobs)

    def _closed(self, item: Item) -> Iterator[Json]:
        if item.is_call:
            yield self._within(
                item, "response.function_call_arguments.done", name=item.name, arguments=item.text
            )
        else:
            done = {"text": item.text, "logprobs": item.logprobs}
            yield self._within(item, "response.output_text.done", **done)
            yield self._within(item, "response.content_part.done", part=_part(item))
        made = self._item(item, self._status(item))
        yield self._event("response.output_item.done", output_index=item.index, item=made)

    def _within(self, item: Item, kind: str, **content: Any) -> Json:
        """Return an event about an item's content."""
        where: Json = {"item_id": self._item_id(item), "output_index": item.index}
        if not item.is_call:
            where["content_index"] = 0
        return self._event(kind, **where, **content)

    def _item_id(self, item: Item) -> str:
        return f"{'fc' if item.is_call else 'msg'}_{self.id}_{item.index}"

    def _status(self, item: Item) -> str:
        """Return an item's status: the last item has the answer's, the others are completed."""
        if item is not self.items[-1]:
            return "completed"
        return {None: "in_progress", "length": "incomplete"}.get(self.finish_reason, "completed")

    def _item(self, item: Item, status: str) -> Json:
        made: Json = {"id": self._item_id(item), "status": status}
        if item.is_call:
            call = {"call_id": item.call_id, "name": item.name, "arguments": item.text}
            return made | {"type": "function_call"} | call
        return made | {"type": "message", "role": "assistant", "content": [_part(item)]}

    def _response(self, status: str) -> Json:
        body = self.body
        choice = body.tool_choice or "auto"
        form = body.text.format
        return {
            "id": f"resp_{self.id}",
            "object": "response",
            "created_at": self.created,
            "completed_at": int(time.time()) if status == "completed" else None,
            "status": status,
            "background": False,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"}
            if status == "incomplete"
            else None,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "max_tool_calls": body.max_tool_calls,
            "metadata": body.metadata or {},
            "model": self.model,
            "output": [self._item(item, self._status(item)) for item in self.items],
            "parallel_tool_calls": body.parallel_tool_calls,
            "previous_response_id": None,
            "prompt_cache_key": body.prompt_cache_key,
            "reasoning": {"effort": body.reasoning.effort, "summary": None},
            "safety_identifier": body.safety_identifier,
            "service_tier": "default",
            "store": False,
            "temperature": body.temperature,
            "text": {
                "format": {"type": "text"}
                if form is None
                else form.model_dump(by_alias=True, exclude_none=True),
                "verbosity": body.text.verbosity or "medium",
            },
            "tool_choice": choice if isinstance(choice, str) else choice.model_dump(),
            "tools": [tool.model_dump() for tool in body.tools],
            "top_logprobs": body.top_logprobs,
            "top_p": body.top_p,
            "truncation": "disabled",
            "usage": self._usage() if self.usage else None,
            "user": body.user,
            **self.about,
        }

    def _usage(self) -> Json:
        given = self.usage
        return {
            "input_tokens": given["prompt_tokens"],
            "input_tokens_details": {
                **given["prompt_tokens_details"],
                "cache_write_tokens": 0,
            },
            "output_tokens": given["completion_tokens"],
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": given["total_tokens"],
        }


def _part(item: Item) -> Json:
    text, logprobs = item.text, item.logprobs
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}
