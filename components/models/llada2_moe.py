"""LLaDA2: block-causal attention, experts chosen inside groups, a shared expert, partial rotary.

Letters: T packed tokens, H hidden size, E experts, K experts of a token.
"""

import torch
from torch import Tensor, nn

from diffray.components.denoiser import MLP, Denoiser, Names
from diffray.components.dims import Dims
from diffray.components.experts import Experts, SparseMLP
from diffray.components.layers import GatedMLP, GatedNames, Parts, whole, wide
from diffray.components.mesh import Mesh
from diffray.components.model_spec import Denoising
from diffray.components.models.fields import Config, Fields
from diffray.components.weight import empty
from diffray.kernels.choose import TORCH, Kernels
from diffray.kernels.router import Routing

NAMES = Names(
    embedding="model.word_embeddings.weight",
    last_norm="model.norm.weight",
    head="lm_head.weight",
    layer="model.layers",
    attention_norm="input_layernorm.weight",
    qkv=("attention.query_key_value.weight",),
    head_norms=("attention.query_layernorm.weight", "attention.key_layernorm.weight"),
    attention_out="attention.dense.weight",
    mlp_norm="post_attention_layernorm.weight",
)
DENSE_NAMES = GatedNames("mlp.gate_proj.weight", "mlp.up_proj.weight", "mlp.down_proj.weight")
SHARED_NAMES = GatedNames(
    "mlp.shared_experts.gate_proj.weight",
    "mlp.shared_experts.up_proj.weight",
    "mlp.shared_experts.down_proj.weight",
)


class GroupedRouter(nn.Module):
    """Chooses the best experts of the best groups, in float32."""

    def __init__(self, fields: Fields, hidden: int, dtype: torch.dtype, kernels: Kernels) -> None:
        super().__init__()
        self.kernels = kernels
        experts, self.chosen = fields.experts()
        self.groups, self.groups_chosen = fields.count("n_group"), fields.count("topk_group")
        self.scale = fields.number("routed_scaling_factor")
        # Upstream always has the buffer; only a checkpoint trained with it must contain it.
        self.needs_bias = fields.flag("moe_router_enable_expert_bias", False)
        self.weight_EH = empty(experts, hidden, dtype=wide(dtype))
        self.bias_E = empty(experts, dtype=wide(dtype))
        per_group = experts // self.groups
        if (
            experts % self.groups
            or self.groups_chosen > self.groups
            or per_group < (2 if self.groups_chosen < self.groups else 1)
            or self.groups_chosen * per_group < self.chosen
        ):
            raise ValueError(
                f"config.json of a {fields.family} model: {self.chosen} experts of {experts} "
                f"cannot be chosen from {self.groups_chosen} groups of {self.groups} (see "
                f"num_experts_per_tok, num_experts, topk_group, n_group)"
            )

    def forward(self, x_TH: Tensor) -> Routing:
        return self.kernels.grouped_sigmoid_router(
            x_TH,
            self.weight_EH,
            self.bias_E,
            self.chosen,
            num_groups=self.groups,
            groups_chosen=self.groups_chosen,
            scale=self.scale,
        )

    def parts(self, prefix: str) -> Parts:
        return {
            f"{prefix}.mlp.gate.weight": whole(self.weight_EH),
            f"{prefix}.mlp.gate.expert_bias": whole(self.bias_E, optional=not self.needs_bias),
        }


def read_dims(fields: Fields) -> Dims:
    """Read config.json; refuse settings that need other arithmetic."""
    fields.only("hidden_act", "silu")
    for key in (
        "norm_head",
        "norm_softmax",
        "use_qkv_bias",
        "use_sliding_window",
        "using_split_qkv_in_self_attention",
    ):
        fields.only(key, False)
    # Upstream's default is True, so the key is required.
    fields.must_be("use_bias", False)
    # The norms on heads are always there: upstream applies them whatever use_qk_norm says.
    fields.only("use_qk_norm", True)
    fields.only("norm_topk_prob", True)
    fields.only("use_rmsnorm", True)
    fields.only("score_function", "sigmoid")
    fields.only("router_dtype", "fp32")
    fields.only("num_nextn_predict_layers", 0)
    heads = fields.count("num_attention_heads")
    head_dim = fields.head_dim(fields.count("hidden_size"), heads)
    return Dims(
        family=fields.family,
        layers=fields.count("num_hidden_layers"),
        hidden=fields.count("hidden_size"),
        heads=heads,
        kv_heads=fields.count("num_key_value_heads"),
        head_dim=head_dim,
        head_norm=True,
        rotated=fields.rotated(head_dim, default=0.5),
        rope=fields.rope(fields.count("max_position_embeddings", 16384)),
        norm_eps=fields.number("rms_norm_eps", 1e-5),
        vocab=fields.count("vocab_size"),
        tied=fields.flag("tie_word_embeddings", False),
    )


def build_llada2_moe(
    config: Config, mesh: Mesh, dtype: torch.dtype, kernels: Kernels = TORCH
) -> Denoiser:
    """Return the model, without storage."""
    fields = Fields(config, "LLaDA2")
    dims = read_dims(fields)
    experts, _ = fields.experts()
    width = fields.count("moe_intermediate_size")
    num_shared = fields.optional_count("num_shared_experts")
    num_dense = fields.optional_count("first_k_dense_replace") or 0

    def sparse() -> SparseMLP:
        shared = None
        if num_shared is not None:
            shared = GatedMLP(dims.hidden, width * num_shared, SHARED_NAMES, mesh, dtype)
        return SparseMLP(
            GroupedRouter(fields, dims.hidden, dtype, kernels),
            Experts(experts, dims.hidden, width, mesh, dtype, kernels),
            shared,
            mesh,
        )

    def dense() -> GatedMLP:
        dense_width = fields.count("intermediate_size")
        return GatedMLP(dims.hidden, dense_width, DENSE_NAMES, mesh, dtype)

    mlps: list[MLP] = [dense() if index < num_dense else sparse() for index in range(dims.layers)]
    # The published configs do not name the length; LLaDA2 was trained with blocks of 32.
    block = fields.count("block_length", fields.count("block_size", 32))
    return Denoiser(
        dims, mlps, NAMES, mesh, dtype, Denoising(block_causal=True, block_length=block), kernels
    )
