"""The numbers that every model of the family tree has, whatever its config.json calls them."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Dims:
    """The shapes and constants of the stack, of the whole model rather than of one rank."""

    family: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    head_norm: bool  # whether each query and key head is normalised before it is rotated
    rotated: int  # how many dimensions of a head are rotated
    rope_theta: float
    norm_eps: float
    vocab: int
    max_positions: int
    tied: bool  # whether the embedding is also the head
    qkv_bias: bool = False

    def __post_init__(self) -> None:
        if self.heads % self.kv_heads:
            raise ValueError(
                f"config.json of a {self.family} model: the number of attention heads "
                f"({self.heads}) must be a multiple of that of key/value heads ({self.kv_heads})"
            )
        if self.rotated < 2 or self.rotated % 2 or self.rotated > self.head_dim:
            raise ValueError(
                f"config.json of a {self.family} model: {self.rotated} of {self.head_dim} "
                f"dimensions of a head would be rotated; the number must be even and fit"
            )
