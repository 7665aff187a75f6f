"""Predicts the time of a step from what a model's matrices and K/V make a processor move."""

from collections.abc import Iterator
from typing import NamedTuple

from torch import nn

from diffray.components.denoiser import Denoiser
from diffray.components.kv_pool import position_bytes
from diffray.components.policy import Policy
from diffray.components.roofline import Ceilings, Part, distinct_experts, least_seconds
from diffray.components.weight import Weight
from diffray.kernels.formats import Format


class Windows(NamedTuple):
    """The windows of a step: one for each of `rows` sequences."""

    rows: int
    length: int
    context: int  # positions that each sees

    @property
    def tokens(self) -> int:
        return self.rows * self.length


def tokens_per_s(
    model: Denoiser,
    form: Format | None,
    policy: Policy,
    rows: int,
    context: int,
    per_forward: float,
    found: Ceilings,
) -> tuple[float, float]:
    """Return the seconds of a step inside a block, and the tokens per second of all sequences.

    A block's first step runs everything, or with causal attention the block before it too. Each
    sequence gets `per_forward` tokens in a step.
    """
    block = min(policy.block_length, context)
    first = context if not policy.causal_length else min(2 * block, context)
    if policy.iteration.next_token:
        first = block  # the step that decides a token stores the one before it
    of_first, of_others = (
        least_seconds(step_parts(model, form, Windows(rows, length, context)), found)
        for length in (first, block)
    )
    steps = max(block / per_forward, 1.0)
    return of_others, rows * block / (of_first + (steps - 1) * of_others)


def step_parts(model: Denoiser, form: Format | None, windows: Windows) -> Iterator[Part]:
    """Yield the products of a rank's step, with K/V in this format."""
    tokens, itemsize = windows.tokens, model.dtype.itemsize
    for layer, shape in zip(model.stack, model.spec.kv_shapes, strict=True):
        matrices = [each for each in layer.modules() if isinstance(each, Weight)]
        for weight in matrices:
            yield _product(model, weight, tokens)
        context = min(windows.context, layer.attention.reach or windows.context)
        seen = layer.attention.out.weight.stored.shape[-1]
        read = windows.rows * context * position_bytes([shape], model.dtype, form)
        yield Part(1, read + 2.0 * itemsize * tokens * seen, 4.0 * tokens * context * seen)
        others = _bytes(layer) - sum(map(_bytes, matrices))  # routers and norms
        yield Part(1, others, 0.0)
    vocab, hidden = model.output.weight.stored.shape
    head = Part.matrix(1, tokens, (hidden, vocab), _bytes(model.output), itemsize)
    yield head._replace(bytes=head.bytes - itemsize * tokens * vocab)  # logits are not stored


def _product(model: Denoiser, weight: Weight, tokens: int) -> Part:
    """Return a matrix's product, or those of the experts that the tokens meet."""
    *here, outputs, inputs = weight.stored.shape
    size, itemsize = (inputs, outputs), model.dtype.itemsize
    if not here:
        return Part.matrix(1, tokens, size, _bytes(weight), itemsize)
    experts, chosen = model.experts
    pairs = tokens * chosen * here[0] / experts
    met = distinct_experts(experts, chosen, tokens) / experts
    return Part.matrix(1, pairs, size, met * _bytes(weight), itemsize)


def _bytes(module: nn.Module) -> int:
    return sum(each.nbytes for each in module.parameters())
