"""DiffusionGemma: Gemma 4's sparse text stack, as a causal encoder and a denoiser of canvases."""

from functools import partial
from typing import Final

import torch
from torch.nn.functional import gelu

from diffray.components.denoiser import OwnStack
from diffray.components.dims import Dims
from diffray.components.experts import Experts
from diffray.components.image import Sight
from diffray.components.layers import GatedMLP, GatedNames
from diffray.components.mesh import Mesh
from diffray.components.model_spec import Denoising
from diffray.components.models.fields import Config, Fields, shown
from diffray.components.models.qwen import MLP_NAMES, QWEN3
from diffray.components.sandwich import (
    Heads,
    NearAttention,
    Rotations,
    SandwichLayer,
    SandwichMLP,
    ScaledRouter,
    WideNorm,
)
from diffray.components.two_pass import Around, SelfConditioning, TwoPass
from diffray.components.vision import Eye, Vision
from diffray.kernels.choose import TORCH, Kernels
from diffray.kernels.rope_scaling import Rope

FAMILY: Final = "DiffusionGemma"
NAMES: Final = QWEN3._replace(
    embedding="model.decoder.embed_tokens.weight",
    last_norm="model.decoder.norm.weight",
    layer="model.decoder.layers",
)
CONDITIONING: Final = "model.decoder.self_conditioning"
CONDITIONING_NAMES: Final = GatedNames("gate_proj.weight", "up_proj.weight", "down_proj.weight")
ENCODER: Final = "model.encoder"
NEAR, FAR = "sliding_attention", "full_attention"
SAMPLER: Final = {
    "max_denoising_steps": "iteration.max_steps",
    "t_min": "iteration.t_min",
    "t_max": "iteration.t_max",
    "stability_threshold": "iteration.stability",
    "confidence_threshold": "iteration.confidence",
    "sampler_config.entropy_bound": "decoder.gamma",
}
_GELU = partial(gelu, approximate="tanh")


def read_dims(fields: Fields) -> Dims:
    """Read the text part of config.json; refuse settings that need other arithmetic."""
    fields.only("hidden_activation", "gelu_pytorch_tanh")
    fields.only("attention_bias", False)
    fields.only("tie_word_embeddings", True)
    fields.must_be("use_bidirectional_attention", "vision")
    head_dim = fields.count("head_dim", 256)
    return Dims(
        family=FAMILY,
        layers=fields.count("num_hidden_layers"),
        hidden=fields.count("hidden_size"),
        heads=fields.count("num_attention_heads"),
        kv_heads=fields.count("num_key_value_heads"),
        head_dim=head_dim,
        head_norm=True,
        rotated=head_dim,
        # Layers have their own theta.
        rope=Rope(1.0, fields.count("max_position_embeddings", 131072)),
        norm_eps=fields.number("rms_norm_eps", 1e-6),
        vocab=fields.count("vocab_size"),
        tied=True,
    )


def read_heads(fields: Fields, dims: Dims) -> list[Heads]:
    """Return the heads of each layer: most layers see only near keys, the others all."""
    rope = fields.inner("rope_parameters", {})
    near, far = (rope.inner(kind, {}) for kind in (NEAR, FAR))
    near.only("rope_type", "default")
    near.only("partial_rotary_factor", 1)
    far.only("rope_type", "proportional")
    reach = fields.count("sliding_window", 512)
    near_theta, far_theta = near.number("rope_theta", 1e4), far.number("rope_theta", 1e6)
    share = far.number("partial_rotary_factor", 0.25)
    kinds = _kinds(fields, dims.layers)
    return [
        Heads(dims.heads, keys, size, reach, True, near_theta, 1.0)
        if kind == NEAR
        else Heads(dims.heads, keys, size, None, False, far_theta, share)
        for kind, (keys, size) in zip(kinds, _key_heads(fields, dims, kinds), strict=True)
    ]


def build_diffusion_gemma(
    config: Config, mesh: Mesh, dtype: torch.dtype, kernels: Kernels = TORCH
) -> TwoPass:
    """Return the model, without storage."""
    whole = Fields(config, FAMILY)
    whole.only("tie_word_embeddings", True)
    fields = whole.inner("text_config")
    dims = read_dims(fields)
    heads = read_heads(fields, dims)
    hidden, eps = dims.hidden, dims.norm_eps
    width, own_width = fields.count("intermediate_size"), fields.count("moe_intermediate_size")
    experts, chosen = fields.experts("top_k_experts")
    eye = Eye.read(whole.inner("vision_config"))

    def dense(names: GatedNames) -> GatedMLP:
        return GatedMLP(hidden, width, names, mesh, dtype, _GELU)

    def sandwich(number: int, own: Heads) -> SandwichLayer:
        mlp = SandwichMLP(
            dense(MLP_NAMES),
            ScaledRouter(experts, chosen, hidden, eps, dtype, kernels),
            Experts(experts, hidden, own_width, mesh, dtype, kernels, _GELU),
            eps,
            dtype,
        )
        attention = NearAttention(number, own, hidden, eps, mesh, dtype)
        return SandwichLayer(attention, mlp, dtype)

    layers = [sandwich(number, own) for number, own in enumerate(heads)]
    sight = Sight(
        token_id=whole.count("image_token_id", 258880),
        begin_id=whole.count("boi_token_id", 255999),
        end_id=whole.count("eoi_token_id", 258882),
        patch=3 * eye.patch**2,
        pool=eye.pool,
        most=min(own.reach or dims.rope.positions for own in heads),
        places=eye.places,
    )
    conditioning = SelfConditioning(dense(CONDITIONING_NAMES), hidden, eps, dtype)
    cap = fields.number("final_logit_softcapping", 30.0)
    return TwoPass(
        dims,
        layers,
        OwnStack(layers, Rotations(dict.fromkeys(heads)), WideNorm(hidden, eps, dtype)),
        NAMES,
        Around(ENCODER, Vision(eye, hidden, dtype), sight, CONDITIONING, conditioning, cap),
        mesh,
        dtype,
        Denoising(
            block_causal=True,
            block_length=whole.count("canvas_length", 256),
            decoder={"kind": "entropy_bound"},
            sampler=SAMPLER,
        ),
        kernels,
    )


def _kinds(fields: Fields, layers: int) -> list[str]:
    """Return how far each layer sees; by default five near ones precede one that sees all."""
    usual = [NEAR if (number + 1) % 6 else FAR for number in range(layers)]
    kinds = fields.names("layer_types", usual)
    if len(kinds) != layers or not set(kinds) <= {NEAR, FAR}:
        raise ValueError(
            f"config.json of a {FAMILY} model: 'layer_types' must be {NEAR} or {FAR} for each of "
            f"the {layers} layers"
        )
    return [*kinds[:-1], FAR]


def _key_heads(fields: Fields, dims: Dims, kinds: list[str]) -> list[tuple[int, int]]:
    """Return how many key heads each layer has, and their size.

    The published config gives them once for layers that see all; one that transformers saved gives
    them in `per_layer_config` for each layer that differs from the usual one.
    """
    usual = (dims.kv_heads, dims.head_dim)
    keys_key, size_key = "num_key_value_heads", "head_dim"
    if fields.config.get("per_layer_config") is None:
        far_keys = fields.count("num_global_key_value_heads", dims.kv_heads)
        far = (far_keys, fields.count("global_head_dim", 512))
        return [usual if kind == NEAR else far for kind in kinds]
    given, found = fields.inner("per_layer_config"), dict.fromkeys(range(dims.layers), usual)
    numbers = {str(number): number for number in found}
    for name in given.config:
        number, layer = numbers.get(name.lstrip("0") or "0"), given.inner(name)  # "05" is layer 5
        if number is None or not layer.config.keys() <= {keys_key, size_key}:
            raise ValueError(
                f"config.json of a {FAMILY} model: 'per_layer_config' may give layers 0 to "
                f"{dims.layers - 1} their {keys_key} and {size_key}, but says {shown(name)}: "
                f"{shown(layer.config)}"
            )
        found[number] = (layer.count(keys_key, usual[0]), layer.count(size_key, usual[1]))
    return list(found.values())
