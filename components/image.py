"""An image as it crosses processes, and what images a model takes: records without torch."""

from dataclasses import dataclass
from hashlib import blake2b


@dataclass(frozen=True, slots=True)
class Image:
    """Patches in rows of `columns`, float32 numbers in [0, 1], and where its soft tokens begin."""

    start: int
    columns: int
    pixels: bytes

    @property
    def digest(self) -> str:
        return f"{self.columns} {blake2b(self.pixels, digest_size=16).hexdigest()}"


@dataclass(frozen=True, slots=True)
class Sight:
    """What images a model takes."""

    token_id: int  # that stands in a prompt where a soft token does
    begin_id: int  # the tokens before and after an image's
    end_id: int
    patch: int  # numbers of a patch
    pool: int  # patches of a side that become one soft token
    most: int  # soft tokens of an image
    places: int  # patches in a row or column, at most
