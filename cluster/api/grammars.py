"""Structured outputs of requests, compiled in a process whose loss does no harm."""

import asyncio
import json
from base64 import b64decode
from collections import OrderedDict
from typing import Any, Final

from diffray.cluster.api.errors import invalid, unavailable
from diffray.cluster.control.grammar_process import (
    NOT_STARTED,
    TOO_LONG,
    grammar_process,
    question,
)
from diffray.cluster.control.limited_process import NotStarted, OutOfTime, Refused
from diffray.components.grammar.structured import StructuredOutputs
from diffray.components.policy import DiffusionParams
from diffray.workers.limits import Limits
from diffray.workers.text import Tokenizer

_KEPT: Final = 1024


class GrammarCompiler:
    """Compiles and caches the structured outputs of one service's requests.

    Concurrent requests for the same output share one compilation. Refusals are cached too, so a
    schema that exceeds the time limit does so only once.
    """

    def __init__(self, tokenizer: Tokenizer | None, limits: Limits) -> None:
        self._tokenizer = tokenizer
        self._kept: OrderedDict[str, bytes | Refused] = OrderedDict()
        self._compiling: dict[str, asyncio.Task[bytes | Refused]] = {}
        self.process = grammar_process(tokenizer, limits)

    async def compiled(
        self, field: str, outputs: StructuredOutputs, diffusion: DiffusionParams
    ) -> bytes:
        """Return the automaton, or the pinned canvas, as bytes.

        Raises ApiError, naming the field, if it cannot be compiled.
        """
        if self._tokenizer is None:
            raise invalid(f"{field} needs a tokenizer, and the checkpoint has none", field)
        asked = question(outputs, diffusion.slots)
        key = json.dumps(asked)
        if (found := self._kept.get(key)) is None:
            if (task := self._compiling.get(key)) is None:
                task = self._compiling[key] = asyncio.create_task(self._compile(key, asked))
                task.add_done_callback(lambda _: self._compiling.pop(key))
            found = await asyncio.shield(task)  # others may wait for it too
        else:
            self._kept.move_to_end(key)
        if isinstance(found, Refused):
            raise invalid(str(found), field)
        return found

    async def _compile(self, key: str, asked: dict[str, Any]) -> bytes | Refused:
        found = self._kept[key] = await self._ask_process(asked)
        if len(self._kept) > _KEPT:
            self._kept.popitem(last=False)
        return found

    async def _ask_process(self, asked: dict[str, Any]) -> bytes | Refused:
        try:
            answer = await self.process.ask(asked)
        except Refused as refused:
            return refused
        except OutOfTime:
            return Refused(TOO_LONG, None)
        except NotStarted:  # not the request's fault, so not kept
            raise unavailable(NOT_STARTED) from None
        return b64decode(answer["automaton"])
