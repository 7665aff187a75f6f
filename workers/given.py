"""What is given of a text: prompts and conversations become the token ids around the gap."""

from collections.abc import Sequence as Items
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

from diffray.components.grammar.compile import Grammars, vocabulary_of
from diffray.components.image import Image
from diffray.workers.admission import Limits
from diffray.workers.prompts import Prompt, as_messages, as_one, is_conversation
from diffray.workers.text import Messages, Tokenizer


class Given(NamedTuple):
    """A prompt's text, if it was one, and the tokens before and after those to be generated."""

    text: str | None
    prompt: tuple[int, ...]
    suffix: tuple[int, ...] = ()
    images: tuple[Image, ...] = ()


@dataclass(frozen=True, slots=True)
class Reader:
    """Reads prompts with a checkpoint's tokenizer; without one, token ids alone."""

    given: Tokenizer | None

    @property
    def tokenizer(self) -> Tokenizer:
        if self.given is None:
            raise ValueError("the checkpoint has no tokenizer.json; give prompts as token ids")
        return self.given

    def any(self, prompt: Prompt | Messages) -> Given:
        if is_conversation(prompt):
            return self.conversation(prompt)
        return self.prompt(as_one(prompt))

    def prompt(self, prompt: str | tuple[int, ...], suffix: str | tuple[int, ...] = ()) -> Given:
        text = prompt if isinstance(prompt, str) else None
        return Given(text, self._encode(prompt, True), self._encode(suffix, False))

    def prompts(
        self, prompts: Items[str | tuple[int, ...]], images: Items[Items[Image]] | None
    ) -> list[Given]:
        """Return several prompts, and the images of each if there are any."""
        shown = [()] * len(prompts) if images is None else images
        if len(shown) != len(prompts):
            raise ValueError(f"images of {len(shown)} prompts, and there are {len(prompts)}")
        pairs = zip(prompts, shown, strict=True)
        return [self.prompt(each)._replace(images=tuple(own)) for each, own in pairs]

    def conversation(self, messages: object) -> Given:
        return Given(None, tuple(self.tokenizer.encode_chat(as_messages(messages))))

    def grammars(self, limits: Limits) -> Grammars:
        """Return what compiles structured outputs to this checkpoint's tokens."""
        encode = partial(self.tokenizer.encode, add_special_tokens=False)
        vocabulary = vocabulary_of(self.tokenizer.fast)
        return Grammars(vocabulary, limits.eos_token_ids, limits.spec.vocab_size, encode)

    def _encode(self, part: str | tuple[int, ...], special: bool) -> tuple[int, ...]:
        return tuple(self.tokenizer.encode(part, special)) if isinstance(part, str) else part
