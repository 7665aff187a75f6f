"""Small random checkpoints in the real layouts, and one forward over a whole sequence."""

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from benchmarks.random_checkpoint import draw_weights
from diffray.components.batch import Batch, Window
from diffray.components.checkpoints.checkpoint import load_model
from diffray.components.kv_pool import KVPool
from diffray.components.model import Model

CPU = torch.device("cpu")

LLADA: dict[str, Any] = {
    "architectures": ["LLaDAModelLM"], "model_type": "llada", "vocab_size": 64, "d_model": 32,
    "n_heads": 4, "n_layers": 2, "mlp_hidden_size": 48, "activation_type": "silu",
    "block_type": "llama", "rope": True, "rope_theta": 10000.0, "layer_norm_type": "rms",
    "rms_norm_eps": 1e-5, "include_bias": False, "weight_tying": False, "max_sequence_length": 64,
    "mask_token_id": 62, "eos_token_id": 63,
}  # fmt: skip
_SIZES: dict[str, Any] = {
    "vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
    "max_position_embeddings": 64,
}  # fmt: skip
_DENSE = _SIZES | {"intermediate_size": 48, "num_key_value_heads": 2, "rms_norm_eps": 1e-6}
_QWEN = _DENSE | {"hidden_act": "silu", "rope_theta": 1000000.0, "tie_word_embeddings": False}
_QWEN |= {"eos_token_id": 63}
DREAM: dict[str, Any] = _QWEN | {
    "architectures": ["DreamModel"], "model_type": "Dream", "use_sliding_window": False,
    "mask_token_id": 62,
}  # fmt: skip
# As published, but for the sizes: it does not name the mask token.
FAST_DLLM_V2: dict[str, Any] = _QWEN | {
    "architectures": ["Fast_dLLM_QwenForCausalLM"], "model_type": "Fast_dLLM_Qwen", "bd_size": 4,
    "attention_dropout": 0.0, "bos_token_id": 61, "initializer_range": 0.02, "use_cache": True,
    "max_window_layers": 2, "rope_scaling": None, "sliding_window": None,
    "use_sliding_window": False,
}  # fmt: skip
LLADA_MOE: dict[str, Any] = _SIZES | {
    "architectures": ["LLaDAMoEModelLM"], "model_type": "llada", "expert_intermediate_size": 16,
    "rms_norm_eps": 1e-5, "rope_theta": 50000.0, "num_experts": 8, "num_experts_per_tok": 2,
    "qk_layernorm": True, "moe_layer_freq": [1, 1], "eos_token_id": 63,
}  # fmt: skip
LLADA2_MOE: dict[str, Any] = _DENSE | {
    "architectures": ["LLaDA2MoeModelLM"], "model_type": "llada2_moe", "head_dim": 8,
    "use_bias": False, "rope_theta": 600000.0, "partial_rotary_factor": 0.5, "num_experts": 8,
    "num_shared_experts": 1, "num_experts_per_tok": 2, "n_group": 4, "topk_group": 2,
    "routed_scaling_factor": 2.5, "moe_intermediate_size": 16, "first_k_dense_replace": 1,
    "moe_router_enable_expert_bias": True, "norm_topk_prob": True, "score_function": "sigmoid",
}  # fmt: skip
SDAR: dict[str, Any] = _QWEN | {
    "architectures": ["SDARForCausalLM"], "model_type": "sdar", "head_dim": 16, "block_size": 4,
    "attention_bias": False, "mask_token_id": 62,
}  # fmt: skip
A2D: dict[str, Any] = _QWEN | {
    "architectures": ["A2DQwen3LMHeadModel"], "model_type": "a2d-qwen3", "head_dim": 16,
}  # fmt: skip
SDAR_MOE: dict[str, Any] = SDAR | {
    "architectures": ["SDARMoeForCausalLM"], "model_type": "sdar_moe", "num_experts": 8,
    "num_experts_per_tok": 2, "moe_intermediate_size": 16, "norm_topk_prob": True,
}  # fmt: skip

IDS = [5, 9, 33, 62, 62, 1, 17, 62, 40, 2, 62, 62]


def random_weights(config: dict[str, Any]) -> dict[str, Tensor]:
    """Draw every tensor that the config's model asks for, in the published layout."""
    torch.manual_seed(0)
    return draw_weights(
        config, lambda _, size: torch.randn(size, dtype=torch.float64) * 0.3 + (len(size) == 1)
    )


def shifted(config: dict[str, Any]) -> dict[str, Tensor]:
    return {name: tensor.flip(0) for name, tensor in random_weights(config).items()}


def save(folder: Path, config: dict[str, Any], weights: dict[str, Tensor]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(weights, folder / "model.safetensors")
    return folder


def parameters(path: Path) -> dict[str, Tensor]:
    return load_model(path, dtype="float64", device="cpu").state_dict()


def assert_same(left: dict[str, Tensor], right: dict[str, Tensor]) -> None:
    assert left.keys() == right.keys()
    assert all(torch.equal(tensor, right[name]) for name, tensor in left.items())


def join_experts(weights: dict[str, Tensor], num_experts: int, merged: bool) -> dict[str, Tensor]:
    """Rewrite single experts as dFactory's merged tensors, or as w1 and w2."""
    joined = {name: t for name, t in weights.items() if ".mlp.experts." not in name}
    for mlp in sorted({name.split(".experts.")[0] for name in weights if ".mlp.experts." in name}):
        gate, up, down = (
            torch.stack([weights[f"{mlp}.experts.{e}.{p}_proj.weight"] for e in range(num_experts)])
            for p in ("gate", "up", "down")
        )
        if merged:
            named = {"gate": gate, "up": up, "down": down}
            joined |= {f"{mlp}.experts.{p}_proj": tensor for p, tensor in named.items()}
        else:
            joined |= {f"{mlp}.w1": torch.cat([gate, up], dim=1), f"{mlp}.w2": down}
    return joined


def kv_pool(model: Model, dtype: torch.dtype, length: int) -> KVPool:
    spec = model.spec
    pages = -(-length // 16) + 1
    return KVPool(shapes=spec.kv_shapes, num_pages=pages, page_size=16, dtype=dtype, device=CPU)


@torch.inference_mode()
def full_forward(
    model: Model, ids: list[int], block: int = 0, *encoded: int, causal: int = 1
) -> Tensor:
    """Return the logits of all positions; those before each of `encoded` are windows.

    Attention in these has blocks of length `causal`; 0: both ways.
    """
    length, x = len(ids), model.embed(torch.tensor(ids))
    kv = kv_pool(model, x.dtype, length)
    pages = torch.tensor(kv.allocate(kv.pages_for(length)))
    spans = [*pairwise((0, *encoded, length))]
    blocks = [*[causal] * len(encoded), block]
    windows = [Window(*span, span[1], b, pages) for span, b in zip(spans, blocks, strict=True)]
    batch = Batch.pack(sorted(windows, key=lambda w: w.shape), CPU, kv.page_size)
    return model.head(model.forward(x[batch.positions_T], batch, kv))[batch.positions_T.argsort()]
