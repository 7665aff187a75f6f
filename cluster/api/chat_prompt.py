"""Turns OpenAI's messages into a prompt in the model's chat format."""

import inspect
import json
from collections.abc import Iterable, Mapping
from typing import Any, Final, Protocol

from diffray.cluster.api.bodies import ROLES
from diffray.cluster.api.errors import ApiError, invalid
from diffray.cluster.api.templates import Templates
from diffray.workers.text import Tokenizer

# Templates use the role's older name.
_OLDER_NAME: Final = {"developer": "system"}
_MEDIA: Final = {
    "image_url": "images",
    "image": "images",
    "input_image": "images",
    "input_audio": "audio",
    "audio_url": "audio",
    "video_url": "videos",
    "file": "files",
    "input_file": "files",
}


class Asks(Protocol):
    """The fields of a body that control the template."""

    @property
    def add_generation_prompt(self) -> bool: ...
    @property
    def continue_final_message(self) -> bool: ...
    @property
    def chat_template_kwargs(self) -> dict[str, Any]: ...
    @property
    def tools(self) -> list[dict[str, Any]]: ...


async def chat_text(
    messages: list[dict[str, Any]], asks: Asks, tokenizer: Tokenizer, templates: Templates
) -> str:
    """Return the conversation as text, up to the start of the assistant's answer."""
    conversation = [_message(number, each) for number, each in enumerate(messages)]
    if not tokenizer.fast.chat_template:
        raise invalid(
            "the checkpoint has no chat template; use /v1/completions with a prompt in the "
            "model's own format"
        )
    if asks.continue_final_message and asks.add_generation_prompt:
        raise invalid(
            "continue_final_message and add_generation_prompt exclude each other; "
            "send add_generation_prompt: false",
            "continue_final_message",
        )
    if asks.chat_template_kwargs:
        _refuse_what_is_not_the_templates(asks.chat_template_kwargs, tokenizer)
    tools = asks.tools or None
    try:
        return await templates.render(
            {
                "conversations": [conversation],
                "chat_template": tokenizer.fast.get_chat_template(tools=tools),
                "tools": tools,
                "add_generation_prompt": asks.add_generation_prompt,
                "continue_final_message": asks.continue_final_message,
                **tokenizer.fast.special_tokens_map,
                **asks.chat_template_kwargs,
            }
        )
    except ValueError as error:
        raise invalid(f"the chat template refuses this: {error}", "messages") from None


def _refuse_what_is_not_the_templates(given: Iterable[str], tokenizer: Tokenizer) -> None:
    """Refuse template arguments that control rendering instead of filling in variables."""
    taken = inspect.signature(tokenizer.fast.apply_chat_template).parameters
    for name in given:
        if name in taken or name in ("messages", "conversations"):
            place = f"chat_template_kwargs.{name[:100]}"
            raise invalid(f"{place} cannot be overridden", place)


def _message(number: int, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return one message with its content as one text."""
    place = f"messages[{number}]"
    role, content = given.get("role"), given.get("content")
    if role not in ROLES:
        raise invalid(f"{place}.role must be one of {', '.join(ROLES)}", f"{place}.role")
    if content is None and role == "assistant":
        content = ""  # it may have called tools without any text
    message = {"role": _OLDER_NAME.get(role, role), "content": _content(place, content)}
    for name, value in given.items():
        if name in ("role", "content") or value in (None, [], {}):
            continue  # clients send answers back with all their empty fields
        field = f"{place}.{name[:100]}"
        if name == "tool_calls" and role == "assistant":
            message[name] = _tool_calls(field, value)
        elif isinstance(value, str) and (
            name == "name" or (name, role) == ("tool_call_id", "tool")
        ):
            message[name] = value
        else:
            raise invalid(f"{field} is not supported", field)
    return message


def _tool_calls(field: str, given: Any) -> list[dict[str, Any]]:
    """Return an earlier answer's calls with arguments as objects, which templates expect."""
    calls: list[dict[str, Any]] = []
    for call in given if isinstance(given, list) else [given]:
        match call:
            case {"function": {"name": str(name), "arguments": str() | dict() as arguments}}:
                function = {"name": name, "arguments": arguments}
            case _:
                raise invalid(
                    f"{field} must be a list of "
                    "{'type': 'function', 'id': ..., 'function': {'name': ..., 'arguments': ...}}",
                    field,
                )
        if isinstance(arguments, str):
            try:
                function["arguments"] = json.loads(arguments or "{}")
            except (ValueError, RecursionError):
                raise invalid(f"{field}: the arguments of {name!r} are not JSON", field) from None
        calls.append({**call, "function": function})
    return calls


def _content(place: str, content: object) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise _no_text(place)
    texts = []
    for part in content:
        if isinstance(part, dict) and isinstance(kind := part.get("type"), str) and kind in _MEDIA:
            field = f"{place}.content"
            raise invalid(f"{field}: {_MEDIA[kind]} are not supported; send only text", field)
        if not isinstance(part, dict) or set(part) != {"type", "text"}:
            raise _no_text(place)
        if part["type"] != "text" or not isinstance(part["text"], str):
            raise _no_text(place)
        texts.append(part["text"])
    return "\n".join(texts)


def _no_text(place: str) -> ApiError:
    return invalid(
        f"{place}.content must be a text, or a list of {{'type': 'text', 'text': ...}}",
        f"{place}.content",
    )
