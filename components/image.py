"""An image as it crosses processes: a record without torch."""

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
