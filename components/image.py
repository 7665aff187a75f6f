"""Records without torch: an image as processes exchange it, and which images a model takes."""

from dataclasses import dataclass
from hashlib import blake2b


@dataclass(frozen=True, slots=True)
class Image:
    """Patches in rows of `columns`, float32 numbers in [0, 1], and where its soft tokens start."""

    start: int
    columns: int
    pixels: bytes

    @property
    def digest(self) -> str:
        return f"{self.columns} {blake2b(self.pixels, digest_size=16).hexdigest()}"


@dataclass(frozen=True, slots=True)
class Sight:
    """The images that a model takes."""

    token_id: int  # the placeholder of a soft token in a prompt
    begin_id: int  # the tokens before and after the soft tokens of an image
    end_id: int
    patch: int  # numbers per patch
    pool: int  # patches per side that become one soft token
    most: int  # soft tokens of an image, at most
    places: int  # patches in a row or column, at most
