"""Turns prompts and conversations into the token ids before and after the text to generate."""

import logging
from collections.abc import Sequence as Items
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

from diffray.cluster.frontend.image_files import Picture, place_images, read_image
from diffray.cluster.frontend.prompts import (
    Prompt,
    as_messages,
    as_one,
    content_of,
    is_conversation,
    pictures_of,
)
from diffray.cluster.frontend.text import Messages, Tokenizer
from diffray.components.image import Image, Sight

log = logging.getLogger(__name__)


class Given(NamedTuple):
    """A prompt's text, if it came as text, and the tokens before and after those to generate."""

    text: str | None
    prompt: tuple[int, ...]
    suffix: tuple[int, ...] = ()
    images: tuple[Image, ...] = ()


@dataclass(frozen=True, slots=True)
class Reader:
    """Reads prompts with a checkpoint's tokenizer; without one it only takes token ids."""

    given: Tokenizer | None
    sight: Sight | None = None  # the images that the model takes

    @property
    def tokenizer(self) -> Tokenizer:
        if self.given is None:
            raise ValueError("the checkpoint has no tokenizer.json; give prompts as token ids")
        return self.given

    def any(self, prompt: Prompt | Messages) -> Given:
        if is_conversation(prompt):
            return self.conversation(prompt)
        return self.prompts([as_one(prompt)], None)[0]

    def prompt(self, prompt: str | tuple[int, ...], suffix: str | tuple[int, ...] = ()) -> Given:
        text = prompt if isinstance(prompt, str) else None
        return Given(text, self._encode(prompt, True), self._encode(suffix, False))

    def prompts(
        self, prompts: Items[str | tuple[int, ...]], images: Items[Items[Picture]] | None
    ) -> list[Given]:
        """Return prompts that are no conversations, and the images of each if there are any."""
        texts = [each for each in prompts if isinstance(each, str)]
        if texts and any(map(self.tokenizer.lacks_template, texts)):
            say_that_there_is_a_template()
        shown = [()] * len(prompts) if images is None else images
        if len(shown) != len(prompts):
            raise ValueError(f"images for {len(shown)} prompts, but there are {len(prompts)}")
        pairs = zip(prompts, shown, strict=True)
        return [self._showing(self.prompt(each), own) for each, own in pairs]

    def conversation(self, messages: object) -> Given:
        given = as_messages(messages)
        images = self._seen(pictures_of(given))
        plain = [{**each, "content": content_of(each["content"])} for each in given]
        ids = tuple(self.tokenizer.encode_chat(plain))
        return self._placed(Given(None, ids), images)

    def _showing(self, given: Given, pictures: Items[Picture]) -> Given:
        """Return a prompt with its images; images that are already patches keep their places."""
        ready = tuple(each for each in pictures if isinstance(each, Image))
        if len(ready) == len(pictures):
            return given._replace(images=ready)
        return self._placed(given, self._seen(pictures))

    def _placed(self, given: Given, images: list[Image]) -> Given:
        if not images:
            return given
        ids, placed = place_images(given.prompt, images, self.sight)
        return given._replace(prompt=ids, images=placed)

    def _seen(self, pictures: Items[Picture]) -> list[Image]:
        """Return the patches of images; refuse them if the model takes none."""
        if pictures and self.sight is None:
            raise ValueError("this model takes no images; leave them out")
        return [read_image(each, self.sight) for each in pictures if self.sight is not None]

    def _encode(self, part: str | tuple[int, ...], special: bool) -> tuple[int, ...]:
        return tuple(self.tokenizer.encode(part, special)) if isinstance(part, str) else part


@cache
def say_that_there_is_a_template() -> None:
    """Say it once in this process."""
    log.warning(
        "this model has a chat template, and a plain text is continued without it; for questions "
        "use chat, or give stream and watch a list of messages"
    )
