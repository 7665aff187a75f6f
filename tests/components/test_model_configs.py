"""Which config.json is understood, and what is refused because it needs other arithmetic."""

import json
from collections.abc import Iterator
from copy import deepcopy
from typing import Any

import pytest
import torch

from diffray.components.mesh import Mesh
from diffray.components.models.registry import choose_build
from tests.helpers.paths import GOLDEN
from tests.helpers.tiny_checkpoints import (
    DREAM,
    FAST_DLLM_V2,
    LLADA,
    LLADA2_MOE,
    LLADA_MOE,
    SDAR,
    SDAR_MOE,
)

FAMILIES = (
    "A2D|Nemotron-Labs-Diffusion|I-DLM|Llama|Qwen2|Qwen3|LLaDA|LLaDA-MoE|LLaDA2|Dream|"
    "Fast-dLLM v2|SDAR|SDAR-MoE"
)
_STACK = "vocab_size hidden_size num_hidden_layers num_attention_heads"
_QWEN = f"{_STACK} max_position_embeddings rope_theta"
_EXPERTS = "num_experts num_experts_per_tok"
# The keys of each golden checkpoint's config, in published form, that it cannot do without.
NEEDED = {
    "llada": "d_model n_heads n_layers activation_type block_type rope rope_theta layer_norm_type "
    "include_bias weight_tying max_sequence_length mlp_ratio",  # or mlp_hidden_size
    "llada_moe": f"{_STACK} {_EXPERTS} expert_intermediate_size rope_theta",
    "llada2_moe": f"{_STACK} {_EXPERTS} num_key_value_heads intermediate_size use_bias rope_theta "
    "n_group topk_group routed_scaling_factor moe_intermediate_size",
    "a2d_qwen3": f"{_QWEN} intermediate_size",
    "ar_llama": f"{_QWEN} intermediate_size factor low_freq_factor high_freq_factor",
    "ar_qwen3": f"{_QWEN} intermediate_size",
    "dream": f"{_QWEN} intermediate_size",
    "fast_dllm_v2": f"{_QWEN} intermediate_size",
    "idlm": f"{_QWEN} intermediate_size",
    "nemotron_labs_diffusion": f"{_QWEN} intermediate_size rope_theta factor",
    "sdar": f"{_QWEN} intermediate_size",
    "sdar_moe": f"{_QWEN} {_EXPERTS} moe_intermediate_size norm_topk_prob",
    "diffusion_gemma": f"{_STACK} num_key_value_heads intermediate_size num_experts top_k_experts "
    "moe_intermediate_size use_bidirectional_attention text_config vision_config",
}
# What has no part in a forward, or is said by another key.
# What is said to be missing without the key.
LACKED = {"mlp_hidden_size": "mlp_ratio", "rope_parameters": "rope_theta"}
LLAMA, QWEN3 = (
    json.loads((GOLDEN / name / "config.json").read_text()) for name in ("ar_llama", "ar_qwen3")
)
UNREAD = {
    *"architectures model_type dtype torch_dtype transformers_version init_fn init_std".split(),
    *"initializer_range use_cache fuse_cross_entropy flash_attention output_router_logits".split(),
    *"attention_dropout embedding_dropout output_dropout residual_dropout".split(),
    *"mask_token_id eos_token_id bos_token_id pad_token_id router_aux_loss_coef".split(),
    *"max_window_layers sliding_window".split(),  # with use_sliding_window, which is refused
    "pretraining_tp",  # how Llama was trained
}
_UNREAD_OF = {
    "llada": {"vocab_size"},  # embedding_size
    "llada_moe": {"dense_intermediate_size", "norm_topk_prob"},  # none dense; never renormalised
    "sdar_moe": {"intermediate_size"},  # no layer is dense
    "a2d_qwen3": {"auto_map", "AutoConfig", "AutoModel", "AutoModelForMaskedLM"},
    "nemotron_labs_diffusion": {
        *"auto_map AutoConfig AutoModel attn_implementation".split(),
        *"ar_loss_weight dlm_loss_weight dp_varying_mask_ratio".split(),  # of its training
    },
    "diffusion_gemma": {"max_position_embeddings"},  # the tower's
}


LINEAR = {"type": "linear", "factor": 2.0}


def keys_of(config: dict[str, Any]) -> Iterator[tuple[dict[str, Any], str]]:
    """Yield each key with the object that has it, inner objects' too."""
    for key, value in list(config.items()):
        yield config, key
        if isinstance(value, dict):
            yield from keys_of(value)


@pytest.mark.slow
@pytest.mark.parametrize("family", NEEDED)
def test_a_missing_or_wrong_key_is_named_in_one_sentence(family: str) -> None:
    config = json.loads((GOLDEN / family / "config.json").read_text())
    missed: set[str] = set()
    unread: set[str] = set()
    for number, (_, key) in enumerate(keys_of(config)):
        for gone in (True, False):
            changed = deepcopy(config)
            owner, _ = list(keys_of(changed))[number]
            owner[key] = None if gone else "nonsense"
            try:
                choose_build(changed)(changed, Mesh(), torch.float32)
            except ValueError as error:
                said = str(error)
                assert "\n" not in said and said.startswith("config.json of a ")
                named = LACKED.get(key, key) if gone else key
                assert f"{named!r}" in said
                missed |= {named} if gone else set()
            else:
                unread |= set() if gone else {key}
    assert missed == set(NEEDED[family].split())
    assert unread <= UNREAD | _UNREAD_OF.get(family, set())


REFUSED: list[tuple[dict[str, Any], dict[str, Any]]] = [
    (LLADA, {
        "alibi": True, "activation_type": "swiglu", "block_type": "sequential", "clip_qkv": 8.0,
        "scale_logits": True, "rope": False, "layer_norm_type": "default",
        "attention_layer_norm": True, "include_bias": True, "include_qkv_bias": True,
        "block_group_size": 2, "rope_scaling": LINEAR,
        "weight_tying": "no", "rope_full_precision": False,
    }),
    (LLADA_MOE, {
        "use_sliding_window": True, "rotary_dim": 4, "hidden_act": "gelu", "attention_bias": True,
        "moe_router_score_function": "sigmoid", "routed_scaling_factor": 2.5,
        "router_num_group": 8, "num_experts": -1, "num_experts_per_tok": 9,
        "moe_layer_freq": [1, 1, 1], "rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4},
    }),
    (LLADA2_MOE, {
        "rotary_dim": 8, "use_rmsnorm": False, "norm_softmax": True, "norm_head": True,
        "use_sliding_window": True, "using_split_qkv_in_self_attention": True, "use_bias": True,
        "use_qkv_bias": True, "norm_topk_prob": False, "score_function": "softmax", "n_group": 3,
        "topk_group": 5, "num_nextn_predict_layers": 1,
    }),
    (DREAM, {
        "hidden_act": "gelu", "use_sliding_window": True, "attention_bias": False,
        "rope_scaling": {"type": "dynamic", "factor": 4.0}, "tie_word_embeddings": "no",
        "num_attention_heads": 0, "rope_theta": "1e6",
    }),
    (FAST_DLLM_V2, {
        "bd_size": "32", "use_sliding_window": True, "hidden_act": "gelu",
        "rope_scaling": {"type": "dynamic", "factor": 4.0},
    }),
    (FAST_DLLM_V2, {"bd_size": 0}),
    (SDAR, {
        "attention_bias": True, "hidden_act": "gelu", "use_sliding_window": True,
        "rope_scaling": {"rope_type": "longrope", "factor": 4.0}, "block_size": 0,
        "use_regular_causal": "no",
    }),
    (QWEN3, {"mask_token_id": 151669, "layer_types": ["sliding_attention"]}),
    (LLAMA, {"mlp_bias": True, "sliding_window": 4096, "attention_bias": True}),
    (SDAR_MOE, {
        "norm_topk_prob": False, "decoder_sparse_step": 2, "mlp_only_layers": [0],
        "num_experts_per_tok": 9, "use_regular_causal": True,
    }),
]  # fmt: skip


@pytest.mark.parametrize(
    ("base", "key", "value"),
    [(base, key, value) for base, changes in REFUSED for key, value in changes.items()],
)
def test_other_arithmetic_is_refused(base: dict[str, Any], key: str, value: object) -> None:
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
        # Without the key at all it is transformers' default, which Llama's first configs meant.
        (LLAMA | {"rope_theta": None}, r"a Llama model lacks the key 'rope_theta'; add it"),
        # Older configs have it beside the object for the stretching.
        (DREAM | {"rope_theta": None}, r"a Dream model lacks the key 'rope_theta'; add it"),
        (DREAM | {"rope_theta": None, "rope_scaling": LINEAR}, "lacks the key 'rope_theta'"),
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
        (LLADA2_MOE, {
            "max_window_layers": 28, "partial_rotary_factor": 0.5, "rotary_dim": 4,
            "use_qk_norm": True, "use_rmsnorm": True, "norm_head": False, "norm_softmax": False,
            "use_sliding_window": False, "using_split_qkv_in_self_attention": False,
        }),
    ],
)  # fmt: skip
def test_published_configs_are_accepted(base: dict[str, Any], published: dict[str, Any]) -> None:
    dims, plain = (
        choose_build(config)(config, Mesh(), torch.float32).dims
        for config in (base | published, base)
    )
    assert dims == plain


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


@pytest.mark.parametrize(
    ("name", "model_type", "said"),
    [
        ("SDARVLForConditionalGeneration", "", "nearest that is supported is SDARForCausalLM; "),
        ("SDARMoEForCausalLM", "", "nearest that is supported is SDARMoeForCausalLM; "),
        ("Unheard", "llada", "nearest that is supported is LLaDAModelLM; "),
        ("NemotronDiffusion", "", "nearest that is supported is NemotronLabsDiffusionModel; "),
        ("TraDoForCausalLM", "", "nearest that is supported is SDARForCausalLM; "),
        ("DiffuCoderModel", "", "nearest that is supported is DreamModel; "),
        ("ZebraForBlockDiffusion", "", "LLaDAModelLM, LLaDAMoEModelLM"),
        ("ResNet", "resnet", "; supported are "),
        ("GPT2LMHeadModel", "gpt2", "; supported are "),
        ("Gemma3ForCausalLM", "gemma3", "; supported are "),
        ("Qwen3MoeForCausalLM", "", "nearest that is supported is Qwen3ForCausalLM; "),
    ],
)
def test_an_unknown_architecture_has_suggestions(name: str, model_type: str, said: str) -> None:
    config = {"architectures": [name]} | ({"model_type": model_type} if model_type else {})
    with pytest.raises(ValueError) as caught:
        choose_build(config)
    text = str(caught.value)
    assert name in text and said in text and "\n" not in text
    assert ("nearest" in text) == ("nearest" in said)
