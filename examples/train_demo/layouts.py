"""The sizes of the two demo models, by the names of their layouts, and their initial weights."""

import math
from typing import Any

import torch
from transformers import PreTrainedTokenizerFast

from examples.train_demo.model import DemoModel
from examples.train_demo.sampler import BLOCK

HIDDEN, LAYERS, HEADS, HEAD_DIM, EXPERTS = 128, 6, 8, 32, 16
SHARED: dict[str, Any] = {
    "hidden_size": HIDDEN, "num_hidden_layers": LAYERS, "num_attention_heads": HEADS,
    "num_key_value_heads": HEADS // 2,
    "head_dim": HEAD_DIM, "num_experts": EXPERTS, "hidden_act": "silu", "rope_theta": 300.0,
    "rope_scaling": None, "max_position_embeddings": 1024, "tie_word_embeddings": False,
    "attention_dropout": 0.0, "torch_dtype": "bfloat16",
}  # fmt: skip
CONFIGS: dict[str, dict[str, Any]] = {
    "llada_moe": SHARED | {
        "architectures": ["LLaDAMoEModelLM"], "model_type": "llada", "num_experts_per_tok": 2,
        "expert_intermediate_size": 96, "dense_intermediate_size": 256,
        "shared_expert_intermediate_size": None, "rms_norm_eps": 1e-5, "norm_topk_prob": None,
        "qk_layernorm": True, "moe_layer_freq": [0] + [1] * (LAYERS - 1),
        "moe_router_score_function": "softmax", "moe_router_enable_expert_bias": False,
    },
    "llada2_moe": SHARED | {
        "architectures": ["LLaDA2MoeModelLM"], "model_type": "llada2_moe",
        "num_experts_per_tok": 2, "intermediate_size": 256, "moe_intermediate_size": 80,
        "num_shared_experts": 1, "first_k_dense_replace": 1, "n_group": 4, "topk_group": 2,
        "norm_topk_prob": True, "routed_scaling_factor": 2.0, "partial_rotary_factor": 0.5,
        "rms_norm_eps": 1e-6, "use_qkv_bias": False, "use_qk_norm": True, "use_bias": False,
        "embedding_dropout": 0.0, "output_dropout": 0.0, "moe_router_enable_expert_bias": True,
        "score_function": "sigmoid", "router_dtype": "fp32", "block_length": BLOCK,
    },
}  # fmt: skip


def build_config(name: str, tokenizer: PreTrainedTokenizerFast) -> dict[str, Any]:
    return CONFIGS[name] | {
        "vocab_size": len(tokenizer),
        "mask_token_id": tokenizer.mask_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }


def initialise(model: DemoModel) -> None:
    for name, parameter in model.model.named_parameters():
        if parameter.dim() < 2:
            continue
        std = parameter.shape[-1] ** -0.5
        if any(part in name for part in ("o_proj", "attention.dense", "w2", "down_proj")):
            std /= math.sqrt(2 * LAYERS)
        if "w2" in name and not model.shape.causal:
            std *= EXPERTS / 2  # a plain softmax gives each of the two experts about 1/16
        if "mlp.gate.weight" in name:
            std = 0.02
        torch.nn.init.normal_(parameter, std=std)
