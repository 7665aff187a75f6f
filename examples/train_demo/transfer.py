"""Starts `llada_moe` from weights of `llada2_moe`, which has already learnt to copy.

Hidden states, heads, the dense layer and the number of experts are the same. LLaDA2 rotates the
first half of a head, in 8 pairs of dimensions; they become those of LLaDA-MoE's 16 pairs that
rotate at the same speed. The shared expert has no counterpart and is dropped.
"""

import torch
from torch import Tensor

from examples.train_demo.layouts import EXPERTS, HEAD_DIM, HEADS

NAMES = {
    "attention.dense.": "self_attn.o_proj.",
    "attention.query_layernorm.": "self_attn.q_norm.",
    "attention.key_layernorm.": "self_attn.k_norm.",
}
_EIGHT = torch.arange(HEAD_DIM // 4)
# For each of LLaDA-MoE's rows of a head, the row of LLaDA2 that moves there: the rotated pair (i,
# i + 8) to (2 i, 2 i + 16), where the angles are the same, and the others between them.
PLACE = torch.stack((_EIGHT, _EIGHT + 16, _EIGHT + 8, _EIGHT + 24)).view(2, 2, -1).mT.flatten()
# LLaDA2's two experts have a total weight of 2, those of a plain softmax about this.
SOFTMAX = 0.5


def to_llada_moe(tensors: dict[str, Tensor], fresh: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the weights for a `llada_moe` whose untrained weights are `fresh`."""
    found: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        tensor = tensor.float()
        if name.endswith("query_key_value.weight"):
            rows = HEADS * HEAD_DIM, HEADS // 2 * HEAD_DIM, HEADS // 2 * HEAD_DIM
            head = name.replace("attention.query_key_value.weight", "self_attn.")
            q, k, v = tensor.split(rows)
            found |= {f"{head}q_proj.weight": _pairs(q), f"{head}k_proj.weight": _pairs(k)}
            found[f"{head}v_proj.weight"] = v
        elif "shared_experts" in name or name.endswith("expert_bias"):
            continue
        else:
            for ours, theirs in NAMES.items():
                name = name.replace(ours, theirs)
            found[name] = _pairs(tensor) if "q_norm" in name or "k_norm" in name else tensor
            if "experts" in name:
                found[name] = _wider(name, tensor, fresh[name])
    return found


def _pairs(rows: Tensor) -> Tensor:
    moved: Tensor = rows.unflatten(0, (-1, HEAD_DIM))[:, PLACE].flatten(0, 1)
    return moved


def _wider(name: str, tensor: Tensor, fresh: Tensor) -> Tensor:
    """Widen an expert with fresh columns, which contribute nothing at first."""
    wide = fresh.detach().clone()
    if name.endswith("w2_experts"):
        wide.zero_()
        wide[..., : tensor.shape[2]] = tensor * (2 / SOFTMAX)
    else:
        rows = tensor.shape[1] // 2
        wide.view(EXPERTS, 2, -1, wide.shape[2])[:, :, :rows] = tensor.view(
            EXPERTS, 2, rows, wide.shape[2]
        )
    return wide
