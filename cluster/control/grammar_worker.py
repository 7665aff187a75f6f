"""Compiles structured outputs, which may take forever, in forks of a limited process."""

from base64 import b64decode, b64encode
from typing import Any, Final

from tokenizers import Tokenizer

from diffray.cluster.control.limited_process import serve_forks
from diffray.components.grammar.compile import Grammars
from diffray.components.grammar.structured import StructuredOutputs

CPU_S: Final = 2.0  # of CPU time, per schema


class Compiler:
    """Takes a vocabulary first, and then compiles structured outputs for it."""

    def __init__(self) -> None:
        self._grammars: Grammars | None = None

    def greet(self, given: dict[str, Any]) -> dict[str, Any]:
        vocabulary = {b64decode(text): ids for text, ids in given["vocabulary"].items()}
        tokenizer = Tokenizer.from_str(given["tokenizer"])
        self._grammars = Grammars(
            vocabulary,
            given["end_ids"],
            given["vocab_size"],
            lambda text: list(tokenizer.encode(text, add_special_tokens=False).ids),
        )
        self._grammars.prepare()
        return {}

    def answer(self, given: dict[str, Any]) -> dict[str, Any]:
        assert self._grammars is not None
        slot_length = given.pop("slot_length")
        compiled = self._grammars.compile(StructuredOutputs(**given), slot_length)
        return {"automaton": b64encode(compiled).decode()}


if __name__ == "__main__":
    compiler = Compiler()
    serve_forks(compiler.greet, compiler.answer, CPU_S)
