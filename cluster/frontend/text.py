"""The tokenizer, and text that grows as tokens become final."""

from collections.abc import Iterable, Mapping
from collections.abc import Sequence as Items
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

Messages = Items[Mapping[str, Any]]
_MOST_INCOMPLETE = 16  # tokens that may wait for the rest of a character
_KEPT_PAIRS = 2**16
_LONGEST_CHAT = 2**24  # characters of a conversation
_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"  # what an incomplete character decodes to


class Tokenizer:
    """A checkpoint's tokenizer; the mask token's spelling in a text is ordinary text."""

    def __init__(self, fast: "PreTrainedTokenizerFast", mask_token_id: int) -> None:
        self.fast = fast
        self._after: dict[tuple[int | None, int], str] = {}
        mask = fast.convert_ids_to_tokens(mask_token_id) if mask_token_id >= 0 else None
        self._mask = str(mask or "")
        # Split in two, the spelling no longer encodes to the special token.
        self._spelled = [*self._plain(self._mask[:1], False), *self._plain(self._mask[1:], False)]

    @staticmethod
    def load(path: Path, mask_token_id: int) -> "Tokenizer | None":
        """Read `tokenizer.json` and related files; None if the checkpoint has none."""
        if not (path / "tokenizer.json").exists():
            return None
        from transformers import PreTrainedTokenizerFast

        try:
            return Tokenizer(PreTrainedTokenizerFast.from_pretrained(path), mask_token_id)
        except Exception as error:  # the parsers of these files raise all kinds of errors
            reason = ascii(" ".join(f"{type(error).__name__}: {error}".split())[:200])[1:-1]
            raise ValueError(
                f"{path}: cannot load tokenizer.json and tokenizer_config.json ({reason}); "
                "download them again"
            ) from error

    @cached_property
    def special(self) -> frozenset[int]:
        """The tokens that have no text when special tokens are skipped."""
        added = self.fast.added_tokens_decoder
        return frozenset(token for token, about in added.items() if about.special)

    @cached_property
    def longest(self) -> int:
        """The most characters that one token can stand for."""
        return max(len(token) for token in self.fast.get_vocab())

    def lacks_template(self, text: str) -> bool:
        """Whether there is a chat template, and the text has no token such as templates write."""
        added = self.fast.added_tokens_decoder.values()
        return bool(self.fast.chat_template) and not any(str(each) in text for each in added)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Return the ids of a text; the mask token's own spelling becomes ordinary tokens."""
        if not self._mask or self._mask not in text:
            return self._plain(text, add_special_tokens)
        ids: list[int] = []
        for number, piece in enumerate(text.split(self._mask)):
            if number:
                ids += self._spelled
            ids += self._plain(piece, add_special_tokens and number == 0)
        return ids

    def encode_chat(self, messages: Messages) -> list[int]:
        """Return the ids of a conversation, up to the start of the assistant's answer."""
        if not self.fast.chat_template:
            raise ValueError(
                "the checkpoint's tokenizer has no chat template; "
                "use generate() with a prompt in the model's own format"
            )
        text = self.chat_text(messages, add_generation_prompt=True)
        return self.encode(text, add_special_tokens=False)

    def chat_text(self, messages: Messages, /, **options: Any) -> str:
        """Return a conversation as the chat template writes it; raise ValueError if it refuses."""
        given = [dict(message) for message in messages]
        try:
            text = str(self.fast.apply_chat_template(given, tokenize=False, **options))
            text.encode()
            if len(text) > _LONGEST_CHAT:
                raise ValueError(f"it made {len(text)} characters, more than {_LONGEST_CHAT}")
        except Exception as error:  # the template is code of the checkpoint
            line = getattr(error, "lineno", None)
            where = f" (line {line} of the template)" if line else ""
            raise ValueError(f"the chat template refuses this: {error}{where}") from None
        return text

    def decode(self, ids: Items[int], skip_special_tokens: bool = True) -> str:
        text = self.fast.decode(list(ids), skip_special_tokens=skip_special_tokens)
        return str(text)

    def tokens(self, ids: Items[int]) -> list[str]:
        """Return the text of each token; a character of several tokens counts to the last one."""
        texts = [self._text_after(*pair) for pair in zip((None, *ids), ids, strict=False)]
        begin = None  # of an incomplete character
        for at, text in enumerate(texts):
            if begin is None and _REPLACEMENT not in text:
                continue
            begin = at if begin is None else begin
            whole = self.decode(ids[begin : at + 1], skip_special_tokens=False)
            if _REPLACEMENT not in whole or at - begin == _MOST_INCOMPLETE:
                texts[begin : at + 1] = [""] * (at - begin) + [whole]
                begin = None
        return texts

    def _text_after(self, before: int | None, token: int) -> str:
        """Return the text of a token after another one; texts of many pairs are cached."""
        if (found := self._after.get((before, token))) is not None:
            return found
        text = self.decode([token], skip_special_tokens=False)
        if before is not None:  # decode both, because some tokenizers drop a text's first space
            first = self.decode([before], skip_special_tokens=False)
            both = self.decode([before, token], skip_special_tokens=False)
            text = both.removeprefix(first) if both.startswith(first) else text
        if len(self._after) == _KEPT_PAIRS:
            self._after.clear()
        self._after[before, token] = text
        return text

    # The interface of Hugging Face's tokenizers.

    def __call__(self, *given: Any, **options: Any) -> Any:
        """Return what the Hugging Face tokenizer returns, a BatchEncoding."""
        return self.fast(*given, **options)

    def apply_chat_template(self, *given: Any, **options: Any) -> Any:
        """Return what the Hugging Face tokenizer returns: ids, or text with `tokenize=False`."""
        return self.fast.apply_chat_template(*given, **options)

    def _plain(self, text: str, add_special_tokens: bool) -> list[int]:
        if not text:
            return []
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise ValueError(f"the text is not valid Unicode: {error.reason}") from None
        # Not verbose: it would warn about lengths, which the engine checks.
        return list(self.fast.encode(text, add_special_tokens=add_special_tokens, verbose=False))


class TextStream:
    """Turns final tokens into text that never has to be retracted.

    It holds back incomplete characters and possible starts of stop strings. A stop string counts
    only if it ends after the text of the first `min_tokens`, as in vLLM.
    """

    def __init__(
        self,
        tokenizer: Tokenizer | None,
        stop: Items[str] = (),
        include_stop: bool = False,
        skip_special_tokens: bool = True,
        min_tokens: int = 0,
    ) -> None:
        self._tokenizer = tokenizer
        self._min_tokens = min_tokens
        self._spared = 0  # characters of the first tokens, in which no stop string may end
        self._stop, self._include_stop = stop, include_stop
        self._skip_special_tokens = skip_special_tokens
        self._begin = 0  # the last tokens are decoded together from here ...
        self._read = 0  # ... and their text has been processed up to here
        self._held = ""
        self.ids: list[int] = []
        self.text = ""
        self.stopped: str | None = None  # the stop string that was found

    @property
    def length(self) -> int:
        """The length of the text of the complete characters, with what is held back."""
        return len(self.text) + len(self._held)

    def push(self, ids: Iterable[int]) -> str:
        """Add tokens until a stop string is complete; return the new text that is certain."""
        before, new = len(self.text), list(ids)
        if self.stopped is None and len(self.ids) < self._min_tokens and self._stop:
            left = self._min_tokens - len(self.ids)
            first, new = new[:left], new[left:]
            self._take(first)
            self._spared = len(self.text) + len(self._held)
        if self.stopped is None and new:
            begin, read, held = self._begin, self._read, self._held
            self._take(new)
            if self._first_stop() is not None:
                # Add the tokens one by one to find the one that completed it.
                del self.ids[-len(new) :]
                self._begin, self._read, self._held = begin, read, held
                self._take_until_stop(new)
        if self.stopped is None:
            self._release(len(self._held) - self._possible_stop())
        return self.text[before:]

    def finish(self) -> str:
        """Return the text held back; there are no more tokens."""
        before = len(self.text)
        if self.stopped is None:
            self._take([], last=True)
            self._release(len(self._held))
        return self.text[before:]

    def _take(self, new: list[int], last: bool = False) -> None:
        """Add the text of more tokens, up to the last complete character."""
        self.ids += new
        if self._tokenizer is None:
            return
        skip = self._skip_special_tokens
        known = self._tokenizer.decode(self.ids[self._begin : self._read], skip)
        # If the last character is incomplete, drop tokens until it is complete.
        for stop in range(len(self.ids), len(self.ids) - max(len(new), 1), -1):
            text = self._tokenizer.decode(self.ids[self._begin : stop], skip)
            if len(text) > len(known) and (last or not text.endswith(_REPLACEMENT)):
                # Two windows of tokens, so that a tokenizer's handling of spaces sees what came
                # before.
                self._begin, self._read = self._read, stop
                self._held += text[len(known) :]
                return
            if not text.endswith(_REPLACEMENT):
                return

    def _take_until_stop(self, new: list[int]) -> None:
        for token in new:
            self._take([token])
            found = self._first_stop()
            if found is not None:
                at, self.stopped = found
                self._release(at + len(self.stopped) if self._include_stop else at)
                return

    def _first_stop(self) -> tuple[int, str] | None:
        """Return the position of the earliest stop string in the held text, and the string."""
        spared = self._spared - len(self.text)
        found = [
            (at, stop)
            for stop in self._stop
            if (at := self._held.find(stop, max(spared - len(stop) + 1, 0))) >= 0
        ]
        return min(found, default=None)

    def _possible_stop(self) -> int:
        """Return the length of the longest suffix of the held text that may start a stop string."""
        lengths = (
            size
            for stop in self._stop
            for size in range(1, min(len(stop), len(self._held) + 1))
            if self._held.endswith(stop[:size])
        )
        return max(lengths, default=0)

    def _release(self, length: int) -> None:
        self.text += self._held[:length]
        self._held = self._held[length:]
