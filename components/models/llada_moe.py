"""LLaDA-MoE: softmax-routed experts, a norm on each query and key head, attention both ways.

Letters: T packed tokens, H hidden size, E experts, K experts of a token.
"""

import torch
from torch import Tensor, nn

from diffray.components.denoiser import MLP, Denoiser, Names
from diffray.components.dims import Dims
from diffray.components.experts import Experts, SparseMLP
from diffray.components.layers import GatedMLP, GatedNames, Parts, empty, whole, wide
from diffray.components.mesh import Mesh
from diffray.components.models.fields import Config, Fields
from diffray.kernels.choose import TORCH, Kernels
from diffray.kernels.router import Routing

NAMES = Names(
    embedding="model.embed_tokens.weight",
    last_norm="model.norm.weight",
    head="lm_head.weight",
    layer="model.layers",
    attention_norm="input_layernorm.weight",
    qkv=("self_attn.q_proj.weight", "self_attn.k_proj.weight", "self_attn.v_proj.weight"),
    head_norms=("self_attn.q_norm.weight", "self_attn.k_norm.weight"),
    attention_out="self_attn.o_proj.weight",
    mlp_norm="post_attention_layernorm.weight",
)
DENSE_NAMES = GatedNames("mlp.gate_proj.weight", "mlp.up_proj.weight", "mlp.down_proj.weight")
# Under the layer, not under its mlp: so the checkpoints have it.
SHARED_NAMES = GatedNames(
    "shared_expert.gate_proj.weight",
    "shared_expert.up_proj.weight",
    "shared_expert.down_proj.weight",
)


class SoftmaxRouter(nn.Module):
    """Chooses by probability over all experts, in float32; the weights are not renormalised."""

    def __init__(
        self,
        experts: int,
        chosen: int,
        hidden: int,
        dtype: torch.dtype,
        kernels: Kernels,
        *,
        biased: bool,
    ) -> None:
        super().__init__()
        self.chosen, self.kernels = chosen, kernels
        self.weight_EH = empty(experts, hidden, dtype=wide(dtype))
        self.bias_E = empty(experts, dtype=wide(dtype)) if biased else None

    def forward(self, x_TH: Tensor) -> Routing:
        return self.kernels.softmax_router(x_TH, self.weight_EH, self.bias_E, self.chosen)

    def parts(self, prefix: str) -> Parts:
        parts = {f"{prefix}.mlp.gate.weight": whole(self.weight_EH)}
        if self.bias_E is not None:
            parts[f"{prefix}.mlp.expert_bias"] = whole(self.bias_E)
        return parts


def read_dims(fields: Fields) -> Dims:
    """Read config.json; refuse what would need other arithmetic."""
    fields.only("hidden_act", "silu")
    fields.only("attention_bias", False)
    fields.only("use_sliding_window", False)
    fields.only("clip_qkv")
    # norm_topk_prob is not read: upstream never renormalises, whatever it says.
    fields.only("moe_router_score_function", "softmax")
    fields.only("routed_scaling_factor", 1)
    fields.only("router_num_group", -2, -1, 0, 1)
    fields.only("router_topk_group", -2, -1, 0, 1)
    heads = fields.count("num_attention_heads")
    head_dim = fields.head_dim(fields.count("hidden_size"), heads)
    return Dims(
        family=fields.family,
        layers=fields.count("num_hidden_layers"),
        hidden=fields.count("hidden_size"),
        heads=heads,
        kv_heads=fields.count("num_key_value_heads", heads),
        head_dim=head_dim,
        head_norm=fields.flag("qk_layernorm", False),
        rotated=fields.rotated(head_dim, default=1.0),
        rope_theta=fields.rope_theta(),
        norm_eps=fields.number("rms_norm_eps", 1e-5),
        vocab=fields.count("vocab_size"),
        max_positions=fields.count("max_position_embeddings", 4096),
        tied=fields.flag("tie_word_embeddings", False),
    )


def build_llada_moe(
    config: Config, mesh: Mesh, dtype: torch.dtype, kernels: Kernels = TORCH
) -> Denoiser:
    """Return the model, without storage."""
    fields = Fields(config, "LLaDA-MoE")
    dims = read_dims(fields)
    experts, chosen = fields.experts()
    width = fields.count("expert_intermediate_size")
    shared_width = fields.optional_count("shared_expert_intermediate_size")
    biased = fields.flag("moe_router_enable_expert_bias", False)

    def sparse() -> SparseMLP:
        shared = None
        if shared_width is not None:
            shared = GatedMLP(dims.hidden, shared_width, SHARED_NAMES, mesh, dtype)
        return SparseMLP(
            SoftmaxRouter(experts, chosen, dims.hidden, dtype, kernels, biased=biased),
            Experts(experts, dims.hidden, width, mesh, dtype, kernels),
            shared,
            mesh,
        )

    def dense() -> GatedMLP:
        dense_width = fields.count("dense_intermediate_size")
        return GatedMLP(dims.hidden, dense_width, DENSE_NAMES, mesh, dtype)

    mlps: list[MLP] = [sparse() if is_sparse else dense() for is_sparse in _sparse_layers(fields)]
    return Denoiser(dims, mlps, NAMES, mesh, dtype, block_causal=False, kernels=kernels)


def _sparse_layers(fields: Fields) -> list[int]:
    """Return, for each layer, whether its MLP is routed."""
    layers = fields.count("num_hidden_layers")
    chosen = fields.counts("moe_layer_freq") or [1] * layers
    if len(chosen) != layers or not set(chosen) <= {0, 1}:
        raise ValueError(
            f"config.json of a LLaDA-MoE model: 'moe_layer_freq' is {chosen}; expected a 0 or 1 "
            f"for each of the {layers} layers"
        )
    return chosen
