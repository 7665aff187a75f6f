"""Starts `llada_moe` from weights of `llada2_moe`, which has already learnt to copy.

Hidden states, heads, the dense layer and the number of experts are the same. LLaDA2 rotates the
first half of a head, in 8 pairs of dimensions; they become those of LLaDA-MoE's 16 pairs that
rotate at the same speed. The shared expert has no counterpart and is dropped.
"""

import torch
from torch import Tensor

from examples.train_demo.model import Shape

# LLaDA2's two experts have a total weight of 2, those of a plain softmax about this.
SOFTMAX = 0.5


def to_llada_moe(
    tensors: dict[str, Tensor], fresh: dict[str, Tensor], shape: Shape
) -> dict[str, Tensor]:
    """Return the weights for a `llada_moe` of this shape whose untrained weights are `fresh`."""
    num, num_kv, dim = shape.heads
    found: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        head, _, _ = name.partition("query_key_value")
        if head != name:
            q, k, v = tensor.split([num * dim, num_kv * dim, num_kv * dim])
            rows = {"q": _pairs(q, dim), "k": _pairs(k, dim), "v": v}
            found |= {f"{head}{part}_proj.weight": weight for part, weight in rows.items()}
        elif "q_norm" in name or "k_norm" in name:
            found[name] = _pairs(tensor, dim)
        elif name in fresh:
            found[name] = _wider(name, tensor, fresh[name]) if "_experts" in name else tensor
    return found


def _pairs(rows: Tensor, dim: int) -> Tensor:
    """Move the rotated pair (i, i + 8) to (2 i, 2 i + 16), and the others between them."""
    eight = torch.arange(dim // 4)
    place = torch.stack((eight, eight + 16, eight + 8, eight + 24)).view(2, 2, -1).mT.flatten()
    moved: Tensor = rows.unflatten(0, (-1, dim))[:, place].flatten(0, 1)
    return moved


def _wider(name: str, tensor: Tensor, fresh: Tensor) -> Tensor:
    """Widen experts with fresh columns, which contribute nothing at first."""
    wide = fresh.detach().clone()
    if name.endswith("w2_experts"):
        wide.zero_()
        wide[..., : tensor.shape[2]] = tensor * (2 / SOFTMAX)
    else:
        rows = tensor.shape[1] // 2
        wide.unflatten(1, (2, -1))[:, :, :rows] = tensor.unflatten(1, (2, -1))
    return wide
