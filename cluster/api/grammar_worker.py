"""Compiles structured outputs, which a client may make endless, in a limited process."""

from base64 import b64decode, b64encode
from typing import Any, Final

from tokenizers import Tokenizer

from diffray.cluster.api.limited_process import serve
from diffray.components.grammar.compile import Grammars
from diffray.components.grammar.structured import StructuredOutputs

CPU_S: Final = 3.0  # of CPU time, per schema


class Compiler:
    """The first line has the vocabulary, the others what is to be compiled for it."""

    def __init__(self) -> None:
        self._grammars: Grammars | None = None

    def answer(self, given: dict[str, Any]) -> dict[str, Any]:
        if self._grammars is None:
            vocabulary = {b64decode(text): ids for text, ids in given["vocabulary"].items()}
            tokenizer = Tokenizer.from_str(given["tokenizer"])
            self._grammars = Grammars(
                vocabulary,
                given["end_ids"],
                given["vocab_size"],
                lambda text: list(tokenizer.encode(text, add_special_tokens=False).ids),
            )
            return {}
        slot_length = given.pop("slot_length")
        compiled = self._grammars.compile(StructuredOutputs(**given), slot_length)
        return {"automaton": b64encode(compiled).decode()}


if __name__ == "__main__":
    serve(Compiler().answer, CPU_S)
