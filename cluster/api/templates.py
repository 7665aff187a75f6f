"""Conversations as text, by the checkpoint's chat template."""

import asyncio
import inspect
from collections.abc import Iterable
from typing import Any, Final

from diffray.cluster.api.bodies import TemplateFields
from diffray.cluster.api.chat_messages import Message
from diffray.cluster.api.errors import invalid
from diffray.workers.text import Tokenizer

LONGEST: Final = 2**24  # characters of a prompt


async def conversation_text(
    messages: list[Message], fields: TemplateFields, tokenizer: Tokenizer
) -> str:
    """Return a conversation as text, up to the start of the assistant's answer."""
    if not tokenizer.fast.chat_template:
        raise invalid(
            "the checkpoint has no chat template; use /v1/completions with a prompt in the "
            "model's own format"
        )
    if fields.continue_final_message and fields.add_generation_prompt:
        raise invalid(
            "continue_final_message and add_generation_prompt exclude each other; "
            "send add_generation_prompt: false",
            "continue_final_message",
        )
    _refuse_reserved(fields.chat_template_kwargs, tokenizer)
    tools = [each.model_dump(exclude_unset=True) for each in fields.tools] or None
    given = {
        "conversations": [[each.for_template() for each in messages]],
        "chat_template": tokenizer.fast.get_chat_template(tools=tools),
        "tools": tools,
        "add_generation_prompt": fields.add_generation_prompt,
        "continue_final_message": fields.continue_final_message,
        **tokenizer.fast.special_tokens_map,
        **fields.model_dump(include={"reasoning_effort"}, exclude_none=True),
        **fields.chat_template_kwargs,
    }
    try:
        return await asyncio.to_thread(_rendered, given)
    except ValueError as error:
        raise invalid(f"the chat template refuses this: {error}", "messages") from None


def _rendered(given: dict[str, Any]) -> str:
    from transformers.utils.chat_template_utils import render_jinja_template

    try:
        made: Any = render_jinja_template(**given)
        text = str(made[0][0])
        text.encode()
    except Exception as error:  # a template may raise anything
        number = getattr(error, "lineno", None)
        where = f" (line {number} of the template)" if number else ""
        raise ValueError(f"{error}{where}") from None
    if len(text) > LONGEST:
        raise ValueError(f"it made {len(text)} characters, more than {LONGEST}")
    return text


def _refuse_reserved(given: Iterable[str], tokenizer: Tokenizer) -> None:
    """Refuse template arguments that control rendering instead of filling in variables."""
    reserved = inspect.signature(tokenizer.fast.apply_chat_template).parameters
    for name in given:
        if name in reserved or name in ("messages", "conversations"):
            place = f"chat_template_kwargs.{name}"
            raise invalid(f"{place} cannot be overridden", place)
