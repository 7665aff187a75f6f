"""The one table of models: what config.json calls an architecture, and what builds it."""

import re
from collections.abc import Iterable, Set
from difflib import get_close_matches
from typing import Final, Protocol

import torch

from diffray.components.denoiser import Denoiser
from diffray.components.mesh import Mesh, UnevenError
from diffray.components.models.a2d import build_a2d_llama, build_a2d_qwen2, build_a2d_qwen3
from diffray.components.models.autoregressive import (
    build_llama,
    build_mistral,
    build_qwen2,
    build_qwen3,
)
from diffray.components.models.diffusion_gemma import build_diffusion_gemma
from diffray.components.models.dream import build_dream
from diffray.components.models.fast_dllm_v2 import build_fast_dllm_v2
from diffray.components.models.fields import Config
from diffray.components.models.llada import build_llada
from diffray.components.models.llada2_moe import build_llada2_moe
from diffray.components.models.llada_moe import build_llada_moe
from diffray.components.models.nemotron import build_nemotron
from diffray.components.models.sdar import build_sdar, build_sdar_moe
from diffray.kernels.choose import TORCH, Kernels, choose_kernels


class Build(Protocol):
    """Builds a model from a config, without storage."""

    def __call__(
        self, config: Config, mesh: Mesh, dtype: torch.dtype, kernels: Kernels = ...
    ) -> Denoiser: ...


ARCHITECTURES: dict[str, Build] = {
    "A2DLlamaLMHeadModel": build_a2d_llama,
    "A2DQwen2LMHeadModel": build_a2d_qwen2,
    "A2DQwen3LMHeadModel": build_a2d_qwen3,
    "DiffusionGemmaForBlockDiffusion": build_diffusion_gemma,
    "DreamModel": build_dream,
    "Fast_dLLM_QwenForCausalLM": build_fast_dllm_v2,
    "LlamaForCausalLM": build_llama,
    "MistralForCausalLM": build_mistral,
    "Qwen2ForCausalLM": build_qwen2,
    "Qwen3ForCausalLM": build_qwen3,
    "LLaDAModelLM": build_llada,
    "LLaDAMoEModelLM": build_llada_moe,
    "FusedLLaDAMoEModelLM": build_llada_moe,
    "LLaDA2MoeModelLM": build_llada2_moe,
    "NemotronLabsDiffusionModel": build_nemotron,
    "SDARForCausalLM": build_sdar,
    "SDARMoeForCausalLM": build_sdar_moe,
}
MODEL_TYPES: Final = {
    "a2d-llama": "A2DLlamaLMHeadModel",
    "a2d-qwen2": "A2DQwen2LMHeadModel",
    "a2d-qwen3": "A2DQwen3LMHeadModel",
    "Dream": "DreamModel",
    "diffusion_gemma": "DiffusionGemmaForBlockDiffusion",
    "Fast_dLLM_Qwen": "Fast_dLLM_QwenForCausalLM",
    "llada": "LLaDAModelLM",
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "llada2_moe": "LLaDA2MoeModelLM",
    "llada2_moe_veomni": "LLaDA2MoeModelLM",
    "nemotron_labs_diffusion": "NemotronLabsDiffusionModel",
    "sdar": "SDARForCausalLM",
    "sdar_moe": "SDARMoeForCausalLM",
}
TORCH_ALONE: Final = (build_diffusion_gemma,)
# Unsupported architectures: prefixes of their names, and the most similar supported one.
_ALIKE: Final = {
    "diffucoder": "DreamModel",
    "dimple": "DreamModel",
    "lavida": "LLaDAModelLM",
    "mmada": "LLaDAModelLM",
    "trado": "SDARForCausalLM",
}
_ENDING: Final = re.compile("(For[A-Z].*|Model(LM)?)$")


def build_model(
    config: Config, mesh: Mesh, dtype: torch.dtype, kernels: Kernels = TORCH
) -> Denoiser:
    """Return the model, without storage; refuse a mesh over which it cannot be sharded."""
    try:
        model = choose_build(config)(config, mesh, dtype, kernels)
    except UnevenError as error:
        sizes = rank_counts(config, expert_parallel=mesh.expert_parallel)
        how = " with expert_parallel" if mesh.expert_parallel else ""
        possible = ", ".join(map(str, sizes))
        raise ValueError(f"{error}; this model runs on {possible} ranks{how}") from None
    if mesh.expert_parallel and not model.routed:
        raise ValueError("the model has no experts to distribute; leave expert_parallel out")
    return model


def runs_on_torch_alone(config: Config) -> bool:
    """Return whether the model needs operations that Triton's kernels lack."""
    return choose_build(config) in TORCH_ALONE


def kernels_for(
    config: Config,
    kernels: str,
    device: torch.device,
    dtype: torch.dtype,
    refused: Set[str] = frozenset(),
) -> Kernels:
    """Return the kernels for a model on this device; refuse those that do not support it."""
    if not runs_on_torch_alone(config):
        return choose_kernels(kernels, device, dtype, refused)
    if kernels == "triton":
        raise ValueError(
            "kernels is 'triton', and this model runs only on torch's functions: Triton's kernels "
            "have no sliding windows; leave kernels at 'auto'"
        )
    return choose_kernels("torch" if kernels == "auto" else kernels, device, dtype)


def check_ranks(config: Config, size: int, *, expert_parallel: bool) -> None:
    """Refuse a number of ranks over which the model cannot be sharded, before it is loaded."""
    build_model(config, Mesh(0, size, expert_parallel), torch.float32)


def check_sharing(config: Config, prefixes: Iterable[str], first_steps: str) -> None:
    """Refuse options for prefixes or first steps if no two requests could share any."""
    name = next(iter(prefixes), None)
    if name is None and first_steps == "off":
        return
    block_causal = build_model(config, Mesh(), torch.float32).spec.block_causal
    if first_steps != "off" and block_causal:
        raise ValueError(
            f"first_step_caching is {first_steps!r}, and in this model attention is block-causal, "
            "so requests share whole prefixes already; leave it out"
        )
    if name is not None and not block_causal:
        raise ValueError(
            f"{name} needs block-causal attention; in this model all positions see "
            "each other, so the K/V of a prompt depend on what follows it; leave it out"
        )


def rank_counts(config: Config, *, expert_parallel: bool) -> tuple[int, ...]:
    """Return the numbers of ranks over which the model can be sharded."""
    build = choose_build(config)
    heads = build(config, Mesh(), torch.float32).dims.heads
    sizes = []
    for size in range(1, heads + 1):
        try:
            build(config, Mesh(0, size, expert_parallel), torch.float32)
        except UnevenError:
            continue
        sizes.append(size)
    return tuple(sizes)


def choose_build(config: Config) -> Build:
    """Return the builder of the config's architecture, or of its model_type if it names none."""
    given = config.get("architectures")
    usual = _usual(config)
    names = given if isinstance(given, list) and given else [usual]
    for name in names:
        if name in ARCHITECTURES:
            return ARCHITECTURES[name]
    near = usual or _nearest(str(names[0]))
    raise ValueError(
        f"config.json names the architectures {given!r} (model_type {config.get('model_type')!r}); "
        + (f"the nearest that is supported is {near}; " if near else "")
        + f"supported are {', '.join(ARCHITECTURES)}"
    )


def _usual(config: Config) -> str | None:
    """Return the architecture that configs of this model_type name."""
    model_type = config.get("model_type")
    if model_type == "llada" and "num_experts" in config:  # dense ones have the same type
        return "LLaDAMoEModelLM"
    return MODEL_TYPES.get(model_type) if isinstance(model_type, str) else None


def _nearest(name: str) -> str | None:
    """Return the supported architecture with the most similar name, without its usual ending."""
    for prefix, known in _ALIKE.items():
        if name.lower().startswith(prefix):
            return known
    stems = {_ENDING.sub("", known): known for known in reversed(ARCHITECTURES)}
    near = get_close_matches(_ENDING.sub("", name[:64]), stems, 1)
    return stems[near[0]] if near else None
