"""Which config.json is understood, and what is refused because it needs other arithmetic."""

from typing import Any

import pytest
import torch

from diffray.components.mesh import Mesh
from diffray.components.models.registry import choose_build
from tests.helpers.tiny_checkpoints import (
    DREAM,
    FAST_DLLM_V2,
    LLADA,
    LLADA2_MOE,
    LLADA_MOE,
    SDAR,
    SDAR_MOE,
)

FAMILIES = "LLaDA|LLaDA-MoE|LLaDA2|Dream|Fast-dLLM v2|SDAR|SDAR-MoE"


@pytest.mark.parametrize(
    ("base", "key", "value"),
    [
        (LLADA, "alibi", True),
        (LLADA, "activation_type", "swiglu"),
        (LLADA, "activation_type", None),
        (LLADA, "block_type", "sequential"),
        (LLADA, "clip_qkv", 8.0),
        (LLADA, "scale_logits", True),
        (LLADA, "rope", False),
        (LLADA, "layer_norm_type", "default"),
        (LLADA, "attention_layer_norm", True),
        (LLADA, "include_bias", True),
        (LLADA, "include_qkv_bias", True),
        (LLADA, "block_group_size", 2),
        (LLADA, "rope_scaling", {"type": "linear", "factor": 2.0}),
        (LLADA, "rope_theta", None),
        (LLADA, "weight_tying", "no"),
        (LLADA, "rope_full_precision", False),
        (LLADA_MOE, "use_sliding_window", True),
        (LLADA_MOE, "rotary_dim", 4),
        (LLADA2_MOE, "rotary_dim", 8),
        (LLADA2_MOE, "use_rmsnorm", False),
        (LLADA2_MOE, "norm_softmax", True),
        (LLADA2_MOE, "norm_head", True),
        (LLADA2_MOE, "use_sliding_window", True),
        (LLADA2_MOE, "using_split_qkv_in_self_attention", True),
        (LLADA_MOE, "hidden_act", "gelu"),
        (LLADA_MOE, "attention_bias", True),
        (LLADA_MOE, "moe_router_score_function", "sigmoid"),
        (LLADA_MOE, "routed_scaling_factor", 2.5),
        (LLADA_MOE, "router_num_group", 8),
        (LLADA_MOE, "num_experts", -1),
        (LLADA_MOE, "num_experts_per_tok", 9),
        (LLADA_MOE, "moe_layer_freq", [1, 1, 1]),
        (LLADA_MOE, "rope_parameters", {"rope_type": "yarn", "rope_theta": 1e4}),
        (LLADA2_MOE, "use_bias", True),
        (LLADA2_MOE, "use_bias", None),
        (LLADA2_MOE, "use_qkv_bias", True),
        (LLADA2_MOE, "norm_topk_prob", False),
        (LLADA2_MOE, "score_function", "softmax"),
        (LLADA2_MOE, "n_group", 3),
        (LLADA2_MOE, "topk_group", 5),
        (LLADA2_MOE, "num_nextn_predict_layers", 1),
        (DREAM, "hidden_act", "gelu"),
        (DREAM, "use_sliding_window", True),
        (DREAM, "attention_bias", False),
        (DREAM, "rope_scaling", {"type": "dynamic", "factor": 4.0}),
        (DREAM, "tie_word_embeddings", "no"),
        (DREAM, "num_attention_heads", 0),
        (DREAM, "intermediate_size", None),
        (DREAM, "rope_theta", None),
        (DREAM, "rope_theta", "1e6"),
        (FAST_DLLM_V2, "bd_size", 0),
        (FAST_DLLM_V2, "bd_size", "32"),
        (FAST_DLLM_V2, "use_sliding_window", True),
        (FAST_DLLM_V2, "rope_scaling", {"type": "dynamic", "factor": 4.0}),
        (FAST_DLLM_V2, "hidden_act", "gelu"),
        (FAST_DLLM_V2, "hidden_size", None),
        (FAST_DLLM_V2, "rope_theta", None),
        (FAST_DLLM_V2, "vocab_size", None),
        (SDAR, "attention_bias", True),
        (SDAR, "hidden_act", "gelu"),
        (SDAR, "use_sliding_window", True),
        (SDAR, "rope_scaling", {"rope_type": "longrope", "factor": 4.0}),
        (SDAR, "block_size", 0),
        (SDAR, "intermediate_size", None),
        (SDAR_MOE, "norm_topk_prob", False),
        (SDAR_MOE, "norm_topk_prob", None),
        (SDAR_MOE, "decoder_sparse_step", 2),
        (SDAR_MOE, "mlp_only_layers", [0]),
        (SDAR_MOE, "num_experts_per_tok", 9),
        (SDAR_MOE, "moe_intermediate_size", None),
        (SDAR_MOE, "rope_theta", None),
    ],
)
def test_a_config_that_needs_other_arithmetic_is_refused(
    base: dict[str, Any], key: str, value: object
) -> None:
    config = base | {key: value}
    with pytest.raises(ValueError, match=rf"config\.json of a ({FAMILIES})( rope_\w+)? .*{key}"):
        choose_build(config)(config, Mesh(), torch.float32)


@pytest.mark.parametrize(
    ("config", "said"),
    [
        (LLADA | {"d_model": 33}, r"hidden size \(33\)"),
        (LLADA | {"n_kv_heads": 3}, r"key/value heads \(3\)"),
        (LLADA | {"d_model": 36}, "9 of 9 dimensions"),
        (LLADA_MOE | {"moe_layer_freq": [0, 1]}, "lacks the key 'dense_intermediate_size'"),
        (LLADA2_MOE | {"topk_group": 1, "num_experts_per_tok": 4}, "4 experts of 8"),
    ],
)
def test_numbers_that_do_not_fit_together_are_refused(config: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        choose_build(config)(config, Mesh(), torch.float32)


@pytest.mark.parametrize(
    ("base", "published"),
    [
        (LLADA, {"rope_full_precision": True, "scale_logits": False, "flash_attention": False}),
        (LLADA_MOE, {"norm_topk_prob": None, "partial_rotary_factor": 1, "rope_scaling": None}),
        (
            LLADA2_MOE,
            {
                "max_window_layers": 28,
                "norm_head": False,
                "norm_softmax": False,
                "partial_rotary_factor": 0.5,
                "rotary_dim": 4,
                "use_qk_norm": True,
                "use_rmsnorm": True,
                "use_sliding_window": False,
                "using_split_qkv_in_self_attention": False,
            },
        ),
        # As families of Qwen2's layers are published, but for the sizes.
        (
            DREAM,
            {
                "attention_dropout": 0.0,
                "bos_token_id": 63,
                "initializer_range": 0.02,
                "max_window_layers": 28,
                "pad_token_id": 63,
                "rope_scaling": None,
                "sliding_window": None,
                "use_cache": True,
            },
        ),
        (FAST_DLLM_V2, {"layer_types": ["full_attention"] * 2, "pad_token_id": 63}),
        (SDAR, {"max_window_layers": 28, "sliding_window": None, "fuse_cross_entropy": True}),
        (SDAR_MOE, {"decoder_sparse_step": 1, "mlp_only_layers": [], "rope_scaling": None}),
    ],
)
def test_what_published_configs_say_is_accepted(
    base: dict[str, Any], published: dict[str, Any]
) -> None:
    dims, plain = (
        choose_build(config)(config, Mesh(), torch.float32).dims
        for config in (base | published, base)
    )
    assert dims == plain


def test_a_missing_theta_is_missed_where_older_configs_have_it() -> None:
    """Also where there is an object for the stretching, which may have one of its own."""
    for scaling in (None, {"type": "linear", "factor": 2.0}):
        config = DREAM | {"rope_scaling": scaling}
        del config["rope_theta"]
        with pytest.raises(ValueError, match=r"a Dream model lacks the key 'rope_theta'; add it"):
            choose_build(config)(config, Mesh(), torch.float32)


def test_sdar_s_blocks_are_as_long_as_its_config_says() -> None:
    for said, length in ((16, 16), (None, 4)):  # the first published ones have no such key
        config = SDAR | {"block_size": said}
        spec = choose_build(config)(config, Mesh(), torch.float32).spec
        assert spec.block_causal and spec.block_length == length


def test_the_class_is_chosen_by_architecture_then_by_keys() -> None:
    for config in (LLADA, LLADA_MOE, LLADA2_MOE, DREAM, FAST_DLLM_V2, SDAR, SDAR_MOE):
        bare = {key: value for key, value in config.items() if key != "architectures"}
        assert choose_build(bare) is choose_build(config)
    assert choose_build(LLADA) is not choose_build(LLADA_MOE)


def test_an_unknown_architecture_is_named_with_what_is_supported() -> None:
    with pytest.raises(ValueError, match=r"GPT2LMHeadModel.*LLaDAModelLM, LLaDAMoEModelLM"):
        choose_build({"architectures": ["GPT2LMHeadModel"], "model_type": "gpt2"})


@pytest.mark.parametrize(
    "name", ["Qwen3ForCausalLM", "LlamaForCausalLM", "Gemma3ForCausalLM", "MistralForCausalLM"]
)
def test_an_autoregressive_model_is_said_to_be_one(name: str) -> None:
    with pytest.raises(
        ValueError, match=f"{name}.*an autoregressive model's.*LLaDAModelLM"
    ) as said:
        choose_build({"architectures": [name], "model_type": "any"})
    assert "nearest" not in str(said.value) and "\n" not in str(said.value)


@pytest.mark.parametrize(
    ("config", "near"),
    [
        ({"architectures": ["DreamOnModel"]}, "DreamModel"),
        ({"architectures": ["SDARVLForConditionalGeneration"]}, "SDARForCausalLM"),
        ({"architectures": ["SDARMoEForCausalLM"]}, "SDARMoeForCausalLM"),
        ({"architectures": ["LLaDA2MoeV2ModelLM"]}, "LLaDA2MoeModelLM"),
        ({"architectures": ["Unheard"], "model_type": "llada"}, "LLaDAModelLM"),
        ({"architectures": ["NemotronLabsDiffusionModel"]}, "SDARForCausalLM"),
        ({"architectures": ["MMadaModelLM"], "model_type": "mmada"}, "LLaDAModelLM"),
        ({"architectures": ["TraDoForCausalLM"]}, "SDARForCausalLM"),
        ({"architectures": ["DiffuCoderModel"]}, "DreamModel"),
        ({"architectures": ["QwenForBlockDiffusion"]}, None),
        ({"architectures": ["ResNet"], "model_type": "resnet"}, None),
    ],
)
def test_the_nearest_supported_architecture_is_named(
    config: dict[str, Any], near: str | None
) -> None:
    said = f"; the nearest that is supported is {near}; " if near else r"\); supported are "
    with pytest.raises(ValueError, match=said):
        choose_build(config)
