"""Conversations as text: chat templates run in a process whose loss does no harm."""

import inspect
from collections.abc import Iterable
from typing import Any

from diffray.cluster.api.bodies import TemplateFields
from diffray.cluster.api.chat_messages import Message
from diffray.cluster.api.errors import invalid
from diffray.cluster.api.template_worker import CPU_S
from diffray.cluster.control.limited_process import LimitedProcess, OutOfTime
from diffray.workers.text import Tokenizer


class Templates:
    """Applies the templates of one service's conversations, one at a time."""

    def __init__(self) -> None:
        self.process = LimitedProcess("diffray.cluster.api.template_worker")

    async def text(
        self, messages: list[Message], fields: TemplateFields, tokenizer: Tokenizer
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
        try:
            return await self.render(
                {
                    "conversations": [[each.for_template() for each in messages]],
                    "chat_template": tokenizer.fast.get_chat_template(tools=tools),
                    "tools": tools,
                    "add_generation_prompt": fields.add_generation_prompt,
                    "continue_final_message": fields.continue_final_message,
                    **tokenizer.fast.special_tokens_map,
                    **fields.model_dump(include={"reasoning_effort"}, exclude_none=True),
                    **fields.chat_template_kwargs,
                }
            )
        except ValueError as error:
            raise invalid(f"the chat template refuses this: {error}", "messages") from None

    async def render(self, given: dict[str, Any]) -> str:
        """Return the text of `render_jinja_template`; raise ValueError with its error."""
        try:
            return str((await self.process.ask(given))["text"])
        except OutOfTime:
            raise ValueError(f"it took longer than {CPU_S:g} s for this conversation") from None


def _refuse_reserved(given: Iterable[str], tokenizer: Tokenizer) -> None:
    """Refuse template arguments that control rendering instead of filling in variables."""
    reserved = inspect.signature(tokenizer.fast.apply_chat_template).parameters
    for name in given:
        if name in reserved or name in ("messages", "conversations"):
            place = f"chat_template_kwargs.{name}"
            raise invalid(f"{place} cannot be overridden", place)
