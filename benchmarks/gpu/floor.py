"""The least time of a step and of a text on this GPU, as components/roofline.py counts it: at the
bandwidth of a measured copy, or the rate of a measured bfloat16 product. Imports no torch.
"""

from collections.abc import Iterator
from typing import NamedTuple

from benchmarks.gpu.shapes import Shape, Work
from diffray.components.roofline import Ceilings, Part, least_seconds

NEIGHBOURS, WARM_UP = 32, 4  # of vicinity: positions beside a block, more steps over everything


def step_ms(shape: Shape, work: Work, weights: str, found: Ceilings) -> float:
    """Return the least time of a step of these windows, with weights in this format."""
    return 1e3 * least_seconds(parts(shape, work, weights), found)


def parts(shape: Shape, work: Work, weights: str) -> Iterator[Part]:
    """Yield the products of a step."""
    tokens, hidden, size, sparse = work.tokens, shape.hidden, shape.head_dim, shape.sparse
    narrow = 2 if weights == "bfloat16" else 1
    # In a model with experts only these are in bytes.
    dense = narrow if sparse is None else 2

    def matrix(calls: int, inputs: int, outputs: int, itemsize: int) -> Part:
        return Part.matrix(calls, tokens, (inputs, outputs), itemsize * inputs * outputs)

    yield matrix(shape.layers, hidden, (shape.heads + 2 * shape.kv_heads) * size, dense)
    yield matrix(shape.layers, shape.heads * size, hidden, dense)
    keys = work.rows * work.context * shape.kv_heads * size
    reads = 4.0 * tokens * work.context * shape.heads * size
    yield Part(shape.layers, 4.0 * keys + 4.0 * tokens * shape.heads * size, reads)
    layers = shape.layers if sparse is None else sparse.dense_layers
    yield matrix(layers, hidden, 2 * shape.width, dense)
    yield matrix(layers, shape.width, hidden, dense)
    if sparse is not None:
        layers = shape.layers - sparse.dense_layers
        pairs, met = tokens * sparse.chosen, shape.distinct_experts(tokens)
        for inputs, outputs in ((hidden, 2 * sparse.width), (sparse.width, hidden)):
            read = met * narrow * inputs * outputs
            yield Part.matrix(layers, pairs, (inputs, outputs), read)
        yield matrix(layers, hidden, sparse.experts, 4)
        if sparse.shared_width:
            yield matrix(layers, hidden, 2 * sparse.shared_width, dense)
            yield matrix(layers, sparse.shared_width, hidden, dense)
    yield matrix(1, hidden, shape.vocab, 2)._replace(bytes=2.0 * hidden * (shape.vocab + tokens))


class Text(NamedTuple):
    """Texts that are written at once, as `generate` times them."""

    rows: int
    rate: float  # tokens accepted in a step
    cache: str
    weights: str
    prompt: int
    tokens: int
    block: int

    def seconds(self, shape: Shape, found: Ceilings) -> float:
        """Return the least time of all steps."""
        length, steps = self.prompt + self.tokens, round(self.tokens / self.rate)
        near = self.block + (NEIGHBOURS if self.cache == "vicinity" else 0)
        # Where attention is causal, a block's first step stores the block before it.
        whole = 2 * self.block if self.cache == "exact" else length

        of_whole, of_near = (
            step_ms(shape, Work(self.rows, window, length), self.weights, found) / 1e3
            for window in (whole, near)
        )
        return self.over_everything * of_whole + (steps - self.over_everything) * of_near

    @property
    def over_everything(self) -> int:
        """The number of steps that run everything: each block's first, and warm-up steps."""
        return -(-self.tokens // self.block) + (WARM_UP if self.cache == "vicinity" else 0)
