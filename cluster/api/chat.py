"""From OpenAI's messages to a prompt in the model's own chat format."""

import inspect
from collections.abc import Iterable, Mapping
from typing import Any, Final, Protocol

from diffray.cluster.api.bodies import ROLES
from diffray.cluster.api.errors import ApiError, invalid
from diffray.workers.text import Tokenizer

# Templates know the role under its older name.
_OLDER_NAME: Final = {"developer": "system"}


class Asks(Protocol):
    """The fields of a body that say how to apply the template."""

    @property
    def add_generation_prompt(self) -> bool: ...
    @property
    def continue_final_message(self) -> bool: ...
    @property
    def chat_template_kwargs(self) -> dict[str, Any]: ...


def chat_text(messages: list[dict[str, Any]], asks: Asks, tokenizer: Tokenizer) -> str:
    """Return the conversation as text, up to where the assistant writes."""
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
    try:
        text = tokenizer.fast.apply_chat_template(
            conversation,
            tokenize=False,
            add_generation_prompt=asks.add_generation_prompt,
            continue_final_message=asks.continue_final_message,
            **asks.chat_template_kwargs,
        )
    except Exception as error:
        # The template is the checkpoint's program and may raise anything; what it says of its input
        # is all there is.
        raise invalid(f"the chat template refuses this: {error}", "messages") from None
    return str(text)


def _refuse_what_is_not_the_templates(given: Iterable[str], tokenizer: Tokenizer) -> None:
    """Refuse names that would say how to apply the template, instead of what is in it."""
    taken = inspect.signature(tokenizer.fast.apply_chat_template).parameters
    for name in given:
        if name in taken or name == "messages":
            place = f"chat_template_kwargs.{name[:100]}"
            raise invalid(f"{place} is not the template's to read", place)


def _message(number: int, given: Mapping[str, Any]) -> dict[str, str]:
    """Return one message with its content as one text."""
    place = f"messages[{number}]"
    role, content = given.get("role"), given.get("content")
    if role not in ROLES:
        raise invalid(f"{place}.role must be one of {', '.join(ROLES)}", f"{place}.role")
    message = {"role": _OLDER_NAME.get(role, role), "content": _content(place, content)}
    for name, value in given.items():
        if name in ("role", "content") or value in (None, [], {}):
            continue  # clients send answers back with all their empty fields
        if name != "name" or not isinstance(value, str):
            raise invalid(f"{place}.{name[:100]} is not supported", f"{place}.{name[:100]}")
        message["name"] = value
    return message


def _content(place: str, content: object) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise _no_text(place)
    texts = []
    for part in content:
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
