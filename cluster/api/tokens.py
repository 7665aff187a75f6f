"""A model's tokens as clients see them: texts as ids, and the text and bytes of single tokens."""

import asyncio
from collections.abc import Callable, Sequence
from itertools import groupby
from typing import Final, TypeVar

from diffray.cluster.api.errors import Json, invalid, too_long
from diffray.cluster.frontend.text import Tokenizer
from diffray.workers.limits import Limits

MASK: Final = "\N{LIGHT SHADE}"  # how a masked position is shown
_LONG_TEXT: Final = 10_000  # characters; tokenizing more would delay all streams
_CHEAP_TEXT: Final = 2**16  # characters; up to this length errors give the exact number of tokens
_REPLACEMENT: Final = "\N{REPLACEMENT CHARACTER}"

Result = TypeVar("Result")


class Tokens:
    """The tokens of a model, which may have no tokenizer."""

    def __init__(self, tokenizer: Tokenizer | None, limits: Limits) -> None:
        self._tokenizer, self._limits = tokenizer, limits
        self._known: dict[int, tuple[str, list[int]]] = {}
        self._byte_of = _byte_alphabet()

    @property
    def context(self) -> int:
        return self._limits.context

    @property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer; raises ApiError without one."""
        if self._tokenizer is None:
            raise invalid("the checkpoint has no tokenizer.json; send prompts as token ids")
        return self._tokenizer

    async def encode(
        self, texts: list[str], special: bool, param: str = "prompt"
    ) -> list[list[int]]:
        """Return the ids of texts; refuse texts that cannot fit before tokenizing them."""
        if not texts:
            return []
        tokenizer, context, longest = self.tokenizer, self._limits.context, max(map(len, texts))
        if longest > _CHEAP_TEXT and longest > context * tokenizer.longest:
            raise too_long(
                context,
                f"{param} is a text of {longest} characters, which are at least "
                f"{longest // tokenizer.longest} tokens. Please reduce its length.",
                param,
            )
        try:
            return await _aside(
                sum(map(len, texts)), lambda: [tokenizer.encode(text, special) for text in texts]
            )
        except ValueError as error:
            raise invalid(f"{param}: {error}", param) from None

    async def decode(self, ids: list[int]) -> str:
        """Return the text of ids, with special tokens; refuse ids that are not tokens."""
        size = self._limits.spec.vocab_size
        for token in ids:
            if not 0 <= token < size:
                raise invalid(
                    f"token id {token} is not in the vocabulary (0 to {size - 1})", "tokens"
                )
        return await _aside(len(ids), lambda: self.tokenizer.decode(ids, False))

    def prompt_text(self, ids: list[int]) -> str:
        """Return a prompt's text; empty for a prompt that will be refused."""
        limits = self._limits
        if len(ids) > limits.context or not all(0 <= i < limits.spec.vocab_size for i in ids):
            return ""
        return self._tokenizer.decode(ids) if self._tokenizer is not None else ""

    def info(self) -> Json:
        """Return the tokenizer's settings for clients, with vLLM's names."""
        fast = self.tokenizer.fast
        special = fast.special_tokens_map
        return {
            "tokenizer_class": type(fast).__name__,
            "model_max_length": self._limits.context,
            "chat_template": fast.get_chat_template() if fast.chat_template else None,
            **{name: special.get(name) for name in ("bos_token", "eos_token", "pad_token")},
            **special,
        }

    def __getitem__(self, token: int) -> tuple[str, list[int]]:
        """Return a token's text and its bytes; without a tokenizer, `token_id:7`."""
        found = self._known.get(token)
        if found is None:
            found = self._known[token] = self._look_up(token)
        return found

    def of_canvas(self, canvas: Sequence[int | None]) -> str:
        """Return the text of a canvas, with MASK for each mask; empty without a tokenizer."""
        if self._tokenizer is None:
            return ""
        text = ""
        for masked, run in groupby(canvas, key=lambda token: token is None):
            ids = list(run)
            shown = [token for token in ids if token is not None]
            text += MASK * len(ids) if masked else self._tokenizer.decode(shown)
        return text

    def _look_up(self, token: int) -> tuple[str, list[int]]:
        if self._tokenizer is None:
            text = f"token_id:{token}"
            return text, list(text.encode())
        text = self._tokenizer.decode([token], skip_special_tokens=False)
        if _REPLACEMENT in text:  # part of a character, or the replacement character itself
            spelling = str(self._tokenizer.fast.convert_ids_to_tokens(token))
            if spelling.startswith("<0x") and len(spelling) == 6:
                return text, [int(spelling[3:5], 16)]
            if all(char in self._byte_of for char in spelling):
                return text, [self._byte_of[char] for char in spelling]
        return text, list(text.encode())


def _byte_alphabet() -> dict[str, int]:
    """Return GPT-2's alphabet of byte-level tokens: a printable character for each byte."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    alphabet = {chr(byte): byte for byte in printable}
    return alphabet | {chr(256 + rank): byte for rank, byte in enumerate(others)}


async def _aside(size: int, work: Callable[[], Result]) -> Result:
    """Do the work, in a thread if it may take long, and return its result."""
    return work() if size < _LONG_TEXT else await asyncio.to_thread(work)
