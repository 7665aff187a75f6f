"""The serving model in the sizes of a shape, with random weights made on the device.

Letters: T packed tokens, K experts of a token, E experts of a layer.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import embedding

from benchmarks import random_checkpoint
from benchmarks.gpu.shapes import Shape
from diffray.components.backend import choose_dtype
from diffray.components.denoiser import Denoiser
from diffray.components.mesh import Mesh
from diffray.components.models.registry import build_model
from diffray.components.quantization import parse_quantization
from diffray.kernels.choose import Kernels

# The formats, as the option `quantization` names them.
WEIGHTS = {
    "bfloat16": None,
    "int8": "int8",
    "float8": "fp8",
    "float8_rows": "w8a8_fp8",  # activations are rounded to float8 as well
}


def quantization_of(shape: Shape, weights: str) -> str | None:
    """Return the option for the experts; in a model without experts, for attention and MLP."""
    form = WEIGHTS[weights]
    return form if form is None or shape.sparse is None else f"experts={form}"


def random_model(
    shape: Shape,
    length: int,
    tokens: int,
    device: torch.device,
    kernels: Kernels,
    dtype: str = "bfloat16",
    weights: str = "bfloat16",
) -> Denoiser:
    """Make a model of a shape's layout; its products keep the magnitude of their inputs.

    Each of at most `tokens` packed tokens has its own embedding, whatever its id is: with random
    weights all masks, which share one, would go to the same few experts, whereas a trained model
    spreads them. The router is the one that serves.
    """
    model = build_model(config_of(shape, length), Mesh(), choose_dtype(dtype, device), kernels)
    model.allocate(device)
    for name, tensor in model.named_parameters():
        if tensor.dim() == 1 or name.endswith("norm.weight_ND"):
            tensor.fill_(0.0 if name.endswith("bias_E") else 1.0)
        else:
            tensor.normal_(0.0, tensor.shape[-1] ** -0.5)
    table_VH = model.embedding.weight_VH
    table_VH.normal_()
    own_T = torch.randint(0, shape.vocab, (tokens,), device=device)
    if (quantized := quantization_of(shape, weights)) is not None:
        model.quantize(parse_quantization(quantized))
    model.embed = lambda ids_T: embedding(own_T[: len(ids_T)], table_VH)  # type: ignore[method-assign]
    return model


@contextmanager
def counted_experts(model: Denoiser) -> Iterator[dict[str, float]]:
    """Count the experts that tokens go to; the yielded dictionary is filled at the end.

    `distinct_experts` is the mean over layers and steps, for steps of the most frequent size;
    `fullest_expert` is the mean of the most tokens that one expert gets. Replays do not count.
    """
    seen: dict[int, list[Tensor]] = {}

    def note(_module: object, _args: object, chosen: tuple[Tensor, ...]) -> None:
        ids_TK = chosen[0]
        seen.setdefault(len(ids_TK), []).append(ids_TK.flatten().bincount())

    routers = [layer.mlp.router for layer in model.stack if layer.mlp.routed]
    hooks = [router.register_forward_hook(note) for router in routers]
    found: dict[str, float] = {}
    try:
        yield found
    finally:
        for hook in hooks:
            hook.remove()
    if seen:
        counts = max(seen.values(), key=len)
        found["distinct_experts"] = sum(int((c > 0).sum()) for c in counts) / len(counts)
        found["fullest_expert"] = sum(int(c.max()) for c in counts) / len(counts)


def config_of(shape: Shape, length: int) -> dict[str, Any]:
    """Return the config.json of a published layout with these sizes."""
    own = shape.sparse
    sizes = shape.hidden, shape.layers, shape.heads, shape.kv_heads, shape.width, shape.vocab
    more: dict[str, Any] = {"head_dim": shape.head_dim, "rotary_dim": shape.rotated}
    more |= {"max_sequence_length": length, "max_position_embeddings": length}
    if own is None:
        return random_checkpoint.config_of("llada", random_checkpoint.Shape(*sizes)) | more
    more["num_experts_per_tok"] = own.chosen
    more["partial_rotary_factor"] = shape.rotated / shape.head_dim
    if own.groups:
        more |= {"n_group": own.groups, "topk_group": own.groups_chosen}
        more["num_shared_experts"] = own.shared_width // own.width
        more["first_k_dense_replace"] = own.dense_layers
    layout = "llada2_moe" if own.groups else "llada_moe"
    checkpoint = random_checkpoint.Shape(*sizes, own.experts, own.width)
    return random_checkpoint.config_of(layout, checkpoint) | more
