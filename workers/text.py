"""Between text and token ids: the tokenizer, and text that grows while tokens become final."""

from collections.abc import Iterable
from collections.abc import Sequence as Items
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

Messages = Items[dict[str, str]]
_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"  # what an incomplete character decodes to


class Tokenizer:
    """A checkpoint's own tokenizer, in which a mask that somebody typed is text."""

    def __init__(self, fast: "PreTrainedTokenizerFast", mask_token_id: int) -> None:
        self.fast = fast
        self._mask = str(fast.convert_ids_to_tokens(mask_token_id) or "")

    @staticmethod
    def load(path: Path, mask_token_id: int) -> "Tokenizer | None":
        """Read `tokenizer.json` and its companions; None where the checkpoint has none."""
        if not (path / "tokenizer.json").exists():
            return None
        from transformers import PreTrainedTokenizerFast

        return Tokenizer(PreTrainedTokenizerFast.from_pretrained(path), mask_token_id)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Return the ids of a text; the mask token's own spelling becomes ordinary tokens."""
        if not self._mask or self._mask not in text:
            return self._plain(text, add_special_tokens)
        ids: list[int] = []
        for number, piece in enumerate(text.split(self._mask)):
            if number:  # cut in two, the spelling is no longer the special token's
                ids += self._plain(self._mask[:1], False) + self._plain(self._mask[1:], False)
            ids += self._plain(piece, add_special_tokens and number == 0)
        return ids

    def encode_chat(self, messages: Messages) -> list[int]:
        """Return the ids of a conversation, up to where the assistant begins to answer."""
        if not self.fast.chat_template:
            raise ValueError(
                "the checkpoint's tokenizer has no chat template; "
                "use generate() with a prompt in the model's own format"
            )
        text = self.fast.apply_chat_template(
            [dict(message) for message in messages], tokenize=False, add_generation_prompt=True
        )
        return self.encode(str(text), add_special_tokens=False)

    def decode(self, ids: Items[int], skip_special_tokens: bool = True) -> str:
        text = self.fast.decode(list(ids), skip_special_tokens=skip_special_tokens)
        return str(text)

    def _plain(self, text: str, add_special_tokens: bool) -> list[int]:
        if not text:
            return []
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise ValueError(f"the text is no valid Unicode: {error.reason}") from None
        return list(self.fast.encode(text, add_special_tokens=add_special_tokens))


class TextStream:
    """Turns tokens, as they become final, into text that will not have to be taken back.

    Held back are the bytes of an incomplete character and what may be the start of a stop string.
    """

    def __init__(
        self,
        tokenizer: Tokenizer | None,
        stop: Items[str] = (),
        include_stop: bool = False,
        skip_special_tokens: bool = True,
    ) -> None:
        self._tokenizer = tokenizer
        self._stop, self._include_stop = stop, include_stop
        self._skip_special_tokens = skip_special_tokens
        self._begin = 0  # the last tokens are decoded together from here ...
        self._read = 0  # ... and up to here their text has been taken over
        self._held = ""
        self.ids: list[int] = []
        self.text = ""
        self.stopped: str | None = None  # the stop string that was found

    def push(self, ids: Iterable[int]) -> str:
        """Take tokens until a stop string is complete; return the text that is now certain."""
        before = len(self.text)
        for token in ids:
            if self.stopped is not None:
                break
            self.ids.append(token)
            self._held += self._decode_new()
            self._find_stop()
        if self.stopped is None:
            self._let_go(len(self._held) - self._possible_stop())
        return self.text[before:]

    def finish(self) -> str:
        """Return what was still held back: no more tokens will come."""
        before = len(self.text)
        if self.stopped is None:
            self._held += self._decode_new(last=True)
            self._let_go(len(self._held))
        return self.text[before:]

    def _decode_new(self, last: bool = False) -> str:
        if self._tokenizer is None:
            return ""
        known = self._tokenizer.decode(
            self.ids[self._begin : self._read], self._skip_special_tokens
        )
        text = self._tokenizer.decode(self.ids[self._begin :], self._skip_special_tokens)
        if len(text) <= len(known) or (text.endswith(_REPLACEMENT) and not last):
            return ""
        # Two windows of tokens, so that a tokenizer's handling of spaces sees what came before.
        self._begin, self._read = self._read, len(self.ids)
        return text[len(known) :]

    def _find_stop(self) -> None:
        found = [(at, stop) for stop in self._stop if (at := self._held.find(stop)) >= 0]
        if found:
            at, stop = min(found)
            self.stopped = stop
            self._let_go(at + len(stop) if self._include_stop else at)

    def _possible_stop(self) -> int:
        """Return the length of the longest end of the held text that may begin a stop string."""
        lengths = (
            size
            for stop in self._stop
            for size in range(1, min(len(stop), len(self._held) + 1))
            if self._held.endswith(stop[:size])
        )
        return max(lengths, default=0)

    def _let_go(self, length: int) -> None:
        self.text += self._held[:length]
        self._held = self._held[length:]
