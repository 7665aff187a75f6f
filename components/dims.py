"""The numbers that every model has, whatever its config.json calls them."""

from dataclasses import dataclass

from diffray.kernels.rope_scaling import Rope


@dataclass(frozen=True, slots=True)
class Dims:
    """Shapes and constants of the whole model, not of one rank."""

    family: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    head_norm: bool  # whether query and key heads are normalised before rotation
    rotated: int  # rotated dimensions of a head
    rope: Rope
    norm_eps: float
    vocab: int
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
