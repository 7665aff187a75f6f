"""Conversations as text: chat templates run in a process that may be lost without harm."""

import asyncio
import inspect
import json
import socket
import subprocess
import sys
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any, Final, TextIO

from diffray.cluster.api import template_worker
from diffray.cluster.api.bodies import TemplateFields
from diffray.cluster.api.errors import invalid
from diffray.cluster.api.messages import Message
from diffray.cluster.api.template_worker import CPU_S
from diffray.workers.text import Tokenizer

_WALL_S: Final = 30.0  # for an answer, even on a busy machine


class Templates:
    """One conversation at a time; the process starts with the first, and again after a loss."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, "template")  # it waits instead of the event loop
        self._stream: TextIO | None = None
        self._process: subprocess.Popen[bytes] | None = None

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
        tools = fields.tools or None
        try:
            return await self.render(
                {
                    "conversations": [[each.for_template() for each in messages]],
                    "chat_template": tokenizer.fast.get_chat_template(tools=tools),
                    "tools": tools,
                    "add_generation_prompt": fields.add_generation_prompt,
                    "continue_final_message": fields.continue_final_message,
                    **tokenizer.fast.special_tokens_map,
                    **fields.chat_template_kwargs,
                }
            )
        except ValueError as error:
            raise invalid(f"the chat template refuses this: {error}", "messages") from None

    async def render(self, given: dict[str, Any]) -> str:
        """Return the text of `render_jinja_template`; raise ValueError with its error."""
        loop = asyncio.get_running_loop()
        answer: dict[str, str] = await loop.run_in_executor(self._thread, self._apply, given)
        if "error" in answer:
            raise ValueError(answer["error"])
        return answer["text"]

    def start(self) -> None:
        """Start the process, so that the first conversation need not wait for it."""
        self._thread.submit(self._connected)

    def close(self) -> None:
        self._thread.submit(self._end)
        self._thread.shutdown(wait=False)

    # For the thread only.

    def _apply(self, given: dict[str, Any]) -> Any:
        try:
            stream = self._connected()
            stream.write(json.dumps(given) + "\n")
            stream.flush()
            answer = stream.readline()
            if not answer.endswith("\n"):
                raise EOFError
            return json.loads(answer)
        except (OSError, EOFError):  # TimeoutError is an OSError
            self._end()
            return {"error": f"it took longer than {CPU_S:g} s for this conversation"}
        except BaseException:
            self._end()
            raise

    def _connected(self) -> TextIO:
        if self._stream is None:
            ours, theirs = socket.socketpair()
            ours.settimeout(_WALL_S)
            command = [sys.executable, "-P", template_worker.__file__, str(theirs.fileno())]
            with ours, theirs:
                self._process = subprocess.Popen(
                    command,
                    pass_fds=[theirs.fileno()],
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                    start_new_session=True,  # not affected by Ctrl-C
                )
                self._stream = ours.makefile("rw", encoding="ascii")  # keeps the socket open
        return self._stream

    def _end(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None
        if self._stream is not None:
            with suppress(OSError):  # of what was not sent
                self._stream.close()
            self._stream = None


def _refuse_reserved(given: Iterable[str], tokenizer: Tokenizer) -> None:
    """Refuse template arguments that control rendering instead of filling in variables."""
    reserved = inspect.signature(tokenizer.fast.apply_chat_template).parameters
    for name in given:
        if name in reserved or name in ("messages", "conversations"):
            place = f"chat_template_kwargs.{name}"
            raise invalid(f"{place} cannot be overridden", place)
