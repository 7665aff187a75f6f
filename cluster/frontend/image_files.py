"""Prepares image files for a model: decodes, scales, cuts into patches, and places in a prompt."""

import math
from base64 import b64decode
from collections.abc import Sequence as Items
from io import BytesIO
from pathlib import Path
from typing import Any, Final

import numpy as np

from diffray.components.config import InvalidField
from diffray.components.image import Image, Sight

# A path, the content of a file, a Pillow image, or patches that already have their place.
Picture = str | Path | bytes | Image | Any

_FORMATS: Final = ("PNG", "JPEG", "WEBP", "GIF")  # of a GIF, the first frame
# Of a decoded image, which takes 4 bytes per pixel. Models see some hundred thousand pixels.
_MOST_PIXELS: Final = 25_000_000
_USUAL: Final = 280  # soft tokens that an image is scaled to, as Gemma's own processor does


def read_image(picture: Picture, sight: Sight) -> Image:
    """Return an image's patches; refuse files that are no images or too large before decoding."""
    if isinstance(picture, Image):
        return picture
    shown = _opened(picture)
    width, height = shown.size
    if width * height > _MOST_PIXELS:
        raise InvalidField(
            f"the image has {width} x {height} pixels; send at most {_MOST_PIXELS}", "images"
        )
    try:
        from PIL import ImageOps

        # An image that was opened here is turned in place, which avoids a second copy.
        is_given = shown is picture
        if is_given:
            upright = ImageOps.exif_transpose(shown)
        else:
            ImageOps.exif_transpose(upright := shown, in_place=True)
        if upright.mode != "RGB":
            upright = upright.convert("RGB")
    except Exception as error:  # decoders raise all kinds of errors
        raise InvalidField(f"the image cannot be decoded: {error}", "images") from None
    columns, rows = _patches(*upright.size, sight)
    side = math.isqrt(sight.patch // 3)
    scaled = upright.resize((columns * side, rows * side), resample=3)  # bicubic
    numbers = np.frombuffer(scaled.tobytes(), dtype=np.uint8)
    cut = numbers.reshape(rows, side, columns, side, 3).swapaxes(1, 2)
    pixels = (cut * (1 / 255)).astype(np.float32)  # the product is in float64
    return Image(0, columns, pixels.tobytes())


def _opened(picture: Picture) -> Any:
    try:
        from PIL import Image as Pillow
    except ImportError:
        raise ValueError("images need Pillow; install it: pip install 'diffray[images]'") from None
    if isinstance(picture, Pillow.Image):
        return picture
    if not isinstance(picture, str | Path | bytes):
        raise ValueError(f"an image is a path, bytes or Pillow's (given: {picture!r:.99})")
    try:
        file = BytesIO(picture) if isinstance(picture, bytes) else picture
        return Pillow.open(file, formats=_FORMATS)
    except OSError as error:
        if isinstance(picture, bytes):
            raise InvalidField("the image is not a PNG, JPEG, WebP or GIF", "images") from None
        raise ValueError(f"cannot read the image {picture}: {error}") from None
    except Exception as error:  # for example, a header that claims a huge image
        raise InvalidField(f"the image cannot be decoded: {error}", "images") from None


def _patches(width: int, height: int, sight: Sight) -> tuple[int, int]:
    """Return how many patches there are across and down: the most that keep the proportions."""
    unit, most = sight.pool, min(_USUAL, sight.most)
    side = math.isqrt(sight.patch // 3)
    factor = math.sqrt(most * unit**2 * side**2 / (width * height))
    # Soft tokens across and down.
    across, down = (int(factor * pixels / (unit * side)) for pixels in (width, height))
    if not down:
        across, down = min(width // height, most), 1
    elif not across:
        across, down = 1, min(height // width, most)
    if max(across, down) * unit > sight.places:
        raise InvalidField(
            f"an image of {width} x {height} pixels is too long and narrow for this model", "images"
        )
    return across * unit, down * unit


def place_images(
    ids: Items[int], images: Items[Image], sight: Sight | None
) -> tuple[tuple[int, ...], tuple[Image, ...]]:
    """Put each image in place of one image token: its soft tokens, between begin and end."""
    if sight is None:
        raise InvalidField("this model takes no images; leave them out", "images")
    asked = list(ids).count(sight.token_id)
    if asked != len(images):
        raise InvalidField(
            f"the prompt has {asked} image tokens ({sight.token_id}) for {len(images)} images; "
            "give one for each",
            "images",
        )
    placed: list[int] = []
    found, left = [], iter(images)
    for token in ids:
        if token != sight.token_id:
            placed.append(token)
            continue
        image = next(left)
        rows = len(image.pixels) // (4 * sight.patch * image.columns)
        found.append(Image(len(placed) + 1, image.columns, image.pixels))
        soft = [sight.token_id] * (rows * image.columns // sight.pool**2)
        placed += [sight.begin_id, *soft, sight.end_id]
    return tuple(placed), tuple(found)


def from_data_url(url: str) -> bytes:
    """Return the content of a data URL; refuse other URLs, which are not fetched."""
    head, comma, data = url.partition(",")
    if not (head.startswith("data:") and head.endswith(";base64") and comma):
        raise InvalidField(
            "an image's URL: expected a data URL, data:image/png;base64,...; others are not "
            "fetched",
            "images",
        )
    try:
        return b64decode(data, validate=True)
    except ValueError as error:
        raise InvalidField(f"an image's URL: this is not base64: {error}", "images") from None
