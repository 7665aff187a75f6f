"""The sizes of the published models that are measured on GPUs."""

from typing import NamedTuple

from diffray.components.roofline import distinct_experts


class Sparse(NamedTuple):
    """The routed experts of a layer."""

    experts: int
    chosen: int
    width: int
    shared_width: int  # of the expert that every token goes to; 0 for none
    dense_layers: int  # this many layers at the start have a dense MLP instead
    groups: int  # 0 for a softmax router, else a sigmoid one with groups
    groups_chosen: int


class Shape(NamedTuple):
    """The sizes of a model."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    rotated: int
    head_norm: bool
    width: int  # of dense MLPs
    vocab: int
    block: int  # 0 if attention is bidirectional
    sparse: Sparse | None

    def distinct_experts(self, tokens: int) -> float:
        """Return how many of a layer's experts the tokens meet, if all are equally likely."""
        if self.sparse is None:
            return 0.0
        return distinct_experts(self.sparse.experts, self.sparse.chosen, tokens)


class Work(NamedTuple):
    """A step's size: the number of sequences, and the lengths of windows and contexts."""

    rows: int
    window: int
    context: int

    def __str__(self) -> str:
        return f"{self.rows}x{self.window}@{self.context}"

    @property
    def tokens(self) -> int:
        return self.rows * min(self.window, self.context)


SHAPES = {
    "llada-moe-7b-a1b": Shape(
        16, 2048, 16, 16, 128, 128, True, 0, 157184, 0, Sparse(64, 8, 1024, 0, 0, 0, 0)
    ),
    "llada-8b": Shape(32, 4096, 32, 32, 128, 128, False, 12288, 126464, 0, None),
    "llada2-mini": Shape(
        20, 2048, 16, 4, 128, 64, True, 5120, 157184, 32, Sparse(256, 8, 512, 512, 1, 8, 4)
    ),
}
# For tests on a CPU: every kind of layer, in sizes with few divisors.
TOY = {
    "toy-moe": Shape(2, 48, 3, 3, 16, 16, True, 0, 150, 0, Sparse(5, 2, 20, 0, 0, 0, 0)),
    "toy-dense": Shape(2, 48, 4, 2, 24, 24, False, 40, 150, 0, None),
    "toy-grouped": Shape(2, 48, 4, 2, 16, 8, True, 40, 150, 8, Sparse(8, 2, 20, 20, 1, 4, 2)),
}
ALL = SHAPES | TOY
