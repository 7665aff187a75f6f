"""The storage formats of weights: their names and what these mean. Does not import torch."""

from typing import Final, NamedTuple

# How many weights along the input share a scale; 0: the whole row.
GROUPS: Final = (0, 32, 64, 128, 256, 512)


class Format(NamedTuple):
    """How a matrix is rounded: the kind of number, and how many of a row share a scale."""

    kind: str
    group: int = 0

    @property
    def name(self) -> str:
        return f"{self.kind}_g{self.group}" if self.group and not self.in_blocks else self.kind

    @property
    def bits(self) -> int:
        return 4 if self.kind in ("int4", "uint4", "q4_0", "q4_1") else 8

    @property
    def in_blocks(self) -> bool:
        """Whether it is one of GGUF's, whose scales are float16."""
        return self.kind in ("q8_0", "q4_0", "q4_1")

    @property
    def has_zero(self) -> bool:
        """Whether each scale has a zero point; without one, ranges are symmetric."""
        return self.kind in ("uint8", "uint4")

    @property
    def has_minimum(self) -> bool:
        """Whether each scale has a minimum instead, in float16, which is added after scaling."""
        return self.kind == "q4_1"

    @property
    def largest(self) -> float:
        """What a row's largest magnitude is scaled to, or the number of steps in its range."""
        if self.is_float8:
            return 448.0
        known = {"int4": 7.5, "q4_0": 7.5, "uint4": 15.0, "q4_1": 15.0, "uint8": 255.0}
        return known.get(self.kind, 127.0)

    @property
    def is_float8(self) -> bool:
        return self.kind in ("fp8", "w8a8_fp8")

    @property
    def rounds_inputs(self) -> bool:
        """Whether the inputs that the weights multiply are rounded too, with a scale per row."""
        return self.kind in ("w8a8", "w8a8_fp8")

    @property
    def for_experts(self) -> "Format":
        """The same format for experts, which have no integer products."""
        return Format("int8" if self.kind == "w8a8" else self.kind, self.group)

    @property
    def in_bytes(self) -> bool:
        """Whether a row is one byte per weight and one scale, as the byte kernels read it."""
        return self.kind in ("int8", "fp8", "w8a8_fp8") and not self.group

    def scales_of(self, columns: int) -> int:
        """Return how many scales a row has."""
        return columns // self.group if self.group else 1

    def obstacle(self, columns: int, here: int) -> str | None:
        """Return why rows of `columns` weights, `here` of them on a rank, do not fit the format."""
        if self.group and columns % self.group:
            return f"its rows of {columns} weights are not a multiple of {self.group}"
        if self.group and here % self.group:
            return f"a rank's {here} of its {columns} columns are not a multiple of {self.group}"
        if self.bits == 4 and (columns % 8 or here % 2):
            return (
                f"its rows of {columns} weights are not a multiple of 8, in which they are packed"
            )
        return None


# GGUF's blocks of 32, by its names; on a CPU products with them are the fastest.
BLOCKS: Final = {kind.upper(): Format(kind, 32) for kind in ("q8_0", "q4_0", "q4_1")}
KINDS: Final = ("int8", "uint8", "int4", "uint4", "fp8", "w8a8", "w8a8_fp8")
FORMATS: Final = {
    form.name: form
    for kind in KINDS
    for form in (Format(kind, group) for group in GROUPS)
    if not form.group or not (form.is_float8 or form.rounds_inputs)
} | {form.name: form for form in BLOCKS.values()}

# Formats of keys and values. Each head of a token has its own scales; a range spans its numbers
# only, so it need not include 0.
KV_FORMATS: Final = {"int8": Format("uint8"), "uint4": Format("uint4", 32)}
