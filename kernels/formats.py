"""The formats in which weights can be kept: their names and what the names mean. Without torch."""

from typing import Final, NamedTuple

# Weights that share a scale, along the input; 0: the whole row.
GROUPS: Final = (0, 32, 64, 128, 256, 512)


class Format(NamedTuple):
    """How a matrix is rounded: the kind of number, and how many of a row share a scale."""

    kind: str
    group: int = 0

    @property
    def name(self) -> str:
        return f"{self.kind}_g{self.group}" if self.group else self.kind

    @property
    def bits(self) -> int:
        return 4 if self.kind in ("int4", "uint4") else 8

    @property
    def has_zero(self) -> bool:
        """Whether each scale has a zero point; without one, ranges are symmetric."""
        return self.kind in ("uint8", "uint4")

    @property
    def largest(self) -> float:
        """The largest magnitude that stands for a row's, or the number of steps of its range."""
        if self.is_float8:
            return 448.0
        return {"int4": 7.5, "uint4": 15.0, "uint8": 255.0}.get(self.kind, 127.0)

    @property
    def is_float8(self) -> bool:
        return self.kind in ("fp8", "w8a8_fp8")

    @property
    def rounds_inputs(self) -> bool:
        """Whether what the weights multiply is rounded as well, with a scale for each row."""
        return self.kind in ("w8a8", "w8a8_fp8")

    @property
    def for_experts(self) -> "Format":
        """The same for experts, for which there are no products of whole numbers."""
        return Format("int8" if self.kind == "w8a8" else self.kind, self.group)

    @property
    def in_bytes(self) -> bool:
        """Whether a row is bytes and one scale, as the byte-a-weight kernels read it."""
        return self.kind in ("int8", "fp8", "w8a8_fp8") and not self.group

    def scales_of(self, columns: int) -> int:
        """Return how many scales a row has."""
        return columns // self.group if self.group else 1

    def obstacle(self, columns: int, here: int) -> str | None:
        """Return why rows of so many weights, of which a rank holds `here`, cannot be kept so."""
        if self.group and columns % self.group:
            return f"its rows of {columns} weights are not a multiple of {self.group}"
        if self.group and here % self.group:
            return f"a rank's {here} of its {columns} columns are not a multiple of {self.group}"
        if self.bits == 4 and (columns % 8 or here % 2):
            return (
                f"its rows of {columns} weights are not a multiple of 8, in which they are packed"
            )
        return None


KINDS: Final = ("int8", "uint8", "int4", "uint4", "fp8", "w8a8", "w8a8_fp8")
FORMATS: Final = {
    form.name: form
    for kind in KINDS
    for form in (Format(kind, group) for group in GROUPS)
    if not form.group or not (form.is_float8 or form.rounds_inputs)
}

# Of keys and values. Each head of a token has scales of its own; a range is as far as its numbers
# go, so it need not hold 0.
KV_FORMATS: Final = {"int8": Format("uint8"), "uint4": Format("uint4", 32)}
