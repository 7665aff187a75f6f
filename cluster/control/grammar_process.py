"""Structured outputs compiled in a process with limits, for callers that wait for it."""

import json
from base64 import b64decode, b64encode
from functools import lru_cache, partial
from typing import Any, Final

from diffray.cluster.control.grammar_worker import CPU_S
from diffray.cluster.control.limited_process import ForkingProcess, NotStarted, OutOfTime, Refused
from diffray.components.config import InvalidField
from diffray.components.grammar.compile import vocabulary_of
from diffray.components.grammar.structured import StructuredOutputs
from diffray.workers.limits import Limits
from diffray.workers.text import Tokenizer

_KEPT: Final = 1024
TOO_LONG: Final = f"structured outputs: compiling took more than {CPU_S:g} s"
NOT_STARTED: Final = "structured outputs: the process that compiles them did not start"


def grammar_process(tokenizer: Tokenizer | None, limits: Limits) -> ForkingProcess:
    """Return a process, which starts with the first request, that compiles for these tokens."""
    return ForkingProcess(
        "diffray.cluster.control.grammar_worker", partial(_greeting, tokenizer, limits)
    )


def _greeting(tokenizer: Tokenizer | None, limits: Limits) -> dict[str, Any]:
    assert tokenizer is not None  # or nothing would have been asked
    vocabulary = vocabulary_of(tokenizer.fast)
    return {
        "vocabulary": {b64encode(text).decode(): ids for text, ids in vocabulary.items()},
        "end_ids": limits.eos_token_ids,
        "vocab_size": limits.spec.vocab_size,
        "tokenizer": tokenizer.fast.backend_tokenizer.to_str(),
    }


def question(outputs: StructuredOutputs, slot_length: int | None) -> dict[str, Any]:
    """Return what the process is asked."""
    return outputs.model_dump(exclude_unset=True) | {"slot_length": slot_length}


class WaitingCompiler:
    """Compiles and caches structured outputs; the caller waits."""

    def __init__(self, tokenizer: Tokenizer | None, limits: Limits) -> None:
        self._process = grammar_process(tokenizer, limits)
        self._compiled = lru_cache(_KEPT)(self._ask)

    def __call__(self, outputs: StructuredOutputs, slot_length: int | None) -> bytes:
        """Return the automaton, or the pinned canvas, as bytes; raises InvalidField."""
        return self._compiled(json.dumps(question(outputs, slot_length)))

    def close(self) -> None:
        self._process.close()

    def _ask(self, asked: str) -> bytes:
        try:
            return b64decode(self._process.ask_waiting(json.loads(asked))["automaton"])
        except Refused as refused:
            raise InvalidField(str(refused), refused.field or "structured_outputs") from None
        except OutOfTime:
            raise InvalidField(TOO_LONG, "structured_outputs") from None
        except NotStarted:
            raise RuntimeError(NOT_STARTED) from None
