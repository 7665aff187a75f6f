"""Images in a prompt: their soft tokens take the place of tokens at some of its positions.

An image's positions see each other both ways, even where final tokens are encoded causally.
"""

from collections.abc import Sequence as Items
from dataclasses import dataclass
from itertools import pairwise

from diffray.components.config import InvalidField
from diffray.components.image import Image, Sight


@dataclass(frozen=True, slots=True)
class Seen:
    """An image in a prompt, and the positions [start, stop) of its soft tokens."""

    image: Image
    start: int
    stop: int
    digest: str


@dataclass(frozen=True, slots=True)
class Images:
    """The images of a prompt, from left to right."""

    seen: tuple[Seen, ...] = ()

    def at(self, position: int) -> Seen | None:
        return next((each for each in self.seen if each.start <= position < each.stop), None)

    def pieces(self, start: int, stop: int) -> list[tuple[int, int]]:
        """Split [start, stop) into the ranges of images and the ranges between them."""
        ends = {stop, *(end for each in self.seen for end in (each.start, each.stop))}
        return list(pairwise([start, *sorted(end for end in ends if start < end <= stop)]))

    def not_inside(self, stop: int) -> int:
        """Return `stop`, or the end of the image at that position."""
        found = self.at(stop)
        return stop if found is None else found.stop

    def key(self, ids: Items[int], start: int) -> tuple[int | str, ...]:
        """Return what the K/V of these tokens, from `start` on, depend on."""
        found: list[int | str] = [*ids]
        for each in self.seen:
            for at in range(max(each.start, start), min(each.stop, start + len(found))):
                found[at - start] = each.digest
        return tuple(found)


def images_of(prompt: Items[int], images: Items[Image], sight: Sight | None) -> Images:
    """Return the prompt's images; refuse those that do not fit the prompt or the model."""
    if sight is None:
        if images:
            raise InvalidField("this model takes no images; leave them out", "images")
        return Images()
    found, end = [], 0
    for number, image in enumerate(images):
        rows, left = divmod(len(image.pixels), 4 * sight.patch * max(image.columns, 1))
        if left or not rows or not 0 < image.columns <= sight.places or rows > sight.places:
            raise InvalidField(
                f"image {number}: {len(image.pixels)} bytes are not rows of {image.columns} "
                f"patches of {sight.patch} float32 numbers, at most {sight.places} each way",
                "images",
            )
        if rows % sight.pool or image.columns % sight.pool:
            raise InvalidField(
                f"image {number} has {rows} by {image.columns} patches; both must be "
                f"multiples of {sight.pool}",
                "images",
            )
        stop = image.start + rows * image.columns // sight.pool**2
        if stop - image.start > sight.most:
            raise InvalidField(
                f"image {number} has {stop - image.start} soft tokens; at most {sight.most} "
                "are allowed, as many as a layer sees back",
                "images",
            )
        if image.start < end or set(prompt[image.start : stop]) != {sight.token_id}:
            raise InvalidField(
                f"image {number}: the prompt must have token {sight.token_id} from "
                f"{image.start} to {stop}, after the image before it",
                "images",
            )
        if len(prompt) < stop or sight.token_id in prompt[end : image.start]:
            raise _without_image(sight)
        found.append(Seen(image, image.start, stop, image.digest))
        end = stop
    if sight.token_id in prompt[end:]:
        raise _without_image(sight)
    return Images(tuple(found))


def _without_image(sight: Sight) -> InvalidField:
    return InvalidField(
        f"the prompt has token {sight.token_id}, an image's placeholder, where no image is; "
        "leave it out or give the image",
        "prompt",
    )
