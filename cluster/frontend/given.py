"""Turns prompts, conversations and parameters into requests that the engine has checked."""

import logging
from collections.abc import Callable, Iterable, Iterator
from collections.abc import Sequence as Items
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import count
from typing import Final, NamedTuple

from diffray.cluster.frontend.image_files import Picture, place_images, read_image
from diffray.cluster.frontend.prompts import (
    Prompt,
    as_messages,
    as_one,
    check_default,
    content_of,
    is_conversation,
    pictures_of,
)
from diffray.cluster.frontend.text import Messages, Tokenizer
from diffray.components.config import InvalidField
from diffray.components.grammar.structured import StructuredOutputs
from diffray.components.image import Image, Sight
from diffray.components.params import SamplingParams
from diffray.components.policy import DiffusionParams
from diffray.workers.adapters import LoadedAdapters
from diffray.workers.admission import CheckedRequest, check_choices
from diffray.workers.limits import Limits
from diffray.workers.messages import Request

log = logging.getLogger(__name__)


class Given(NamedTuple):
    """A prompt's text, if it came as text, and the tokens before and after those to generate."""

    text: str | None
    prompt: tuple[int, ...]
    suffix: tuple[int, ...] = ()
    images: tuple[Image, ...] = ()
    answer: tuple[int, ...] = ()  # what it will be, and the places of its tokens that are shown
    places: tuple[int, ...] = ()


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

    def answered(self, prompt: str | tuple[int, ...], answer: str | tuple[int, ...]) -> Given:
        """Return a prompt and its answer.

        Two texts are split where the prompt's own ids end; spaces at its end count as the answer's.
        """
        if isinstance(prompt, str) and isinstance(answer, str) and (text := prompt.rstrip()):
            ids, whole = self._encode(text, True), self._encode(prompt + answer, True)
            if whole[: len(ids)] == ids:
                return Given(text, ids, answer=whole[len(ids) :])
        return Given(None, self._encode(prompt, True), answer=self._encode(answer, False))

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


class BadTokens(NamedTuple):
    """Tokens that must not be generated: single ones, and sequences of several."""

    ids: tuple[int, ...] = ()
    sequences: tuple[tuple[int, ...], ...] = ()


NO_BAD_TOKENS: Final = BadTokens()


def bad_tokens(words: Iterable[str], tokenizer: Tokenizer | None) -> BadTokens:
    """Return the tokens of words, both at the start of a text and after a space."""
    found: dict[tuple[int, ...], None] = {}
    for word in words:
        if tokenizer is None:
            raise InvalidField(
                "bad_words need a tokenizer, and the checkpoint has none", "bad_words"
            )
        own, spaced = (
            tuple(tokenizer.encode(text, add_special_tokens=False)) for text in (word, f" {word}")
        )
        if not own:
            raise InvalidField(
                f"bad_words: {word[:100]!r} has no tokens; leave it out", "bad_words"
            )
        found[own] = None
        if not _contains(spaced, own):
            found[spaced] = None
    return BadTokens(
        tuple(ids[0] for ids in found if len(ids) == 1), tuple(ids for ids in found if len(ids) > 1)
    )


def with_bad_tokens(params: SamplingParams, tokenizer: Tokenizer | None) -> SamplingParams:
    """Return the parameters with their bad words as tokens."""
    if not params.bad_words:
        return params
    ids, sequences = bad_tokens(params.bad_words, tokenizer)
    tokens = {
        "bad_words": (),
        "bad_token_ids": params.bad_token_ids + ids,
        "bad_token_sequences": params.bad_token_sequences + sequences,
    }
    return params.model_copy(update=tokens)


def _contains(ids: tuple[int, ...], part: tuple[int, ...]) -> bool:
    return any(ids[at : at + len(part)] == part for at in range(len(ids) - len(part) + 1))


Compile = Callable[[StructuredOutputs, int | None], bytes]  # given the length of slots, if any


class RequestMaker:
    """Makes requests with increasing uids; `default` fills in diffusion parameters left out."""

    def __init__(
        self,
        reader: Reader,
        default: DiffusionParams,
        limits: Limits,
        adapters: LoadedAdapters,
        compiler: Compile,
    ) -> None:
        check_default(default, limits.spec)
        self._reader, self._default, self._limits = reader, default, limits
        self._adapters, self._compile = adapters, compiler
        self._uids: Iterator[int] = count()

    def requests(
        self, given: Given, params: SamplingParams, watch: bool = False
    ) -> list[CheckedRequest]:
        """Return an engine request for each choice; raise ValueError if it cannot run."""
        tokenizer = self._reader.given
        if params.stop and tokenizer is None:
            raise ValueError("stop strings need a tokenizer, and the checkpoint has none")
        params = with_bad_tokens(params, tokenizer).model_copy(
            update={"diffusion": params.diffusion.over(self._default)}
        )
        grammar = b""
        if params.structured_outputs is not None:
            _ = self._reader.tokenizer  # without one there are no texts
            grammar = self._compile(params.structured_outputs, params.diffusion.slots)
        request = Request(
            0, given.prompt, params, given.suffix, watch, images=given.images, grammar=grammar
        )
        request = replace(request, answer=given.answer, places=given.places)
        request = self._adapters.given_to(request)
        return check_choices(request, self._limits, partial(next, self._uids))
