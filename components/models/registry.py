"""The one table of models: what config.json calls an architecture, and who builds it."""

from collections.abc import Callable

import torch

from diffray.components.denoiser import Denoiser
from diffray.components.mesh import Mesh
from diffray.components.models.fields import Config
from diffray.components.models.llada import build_llada
from diffray.components.models.llada2_moe import build_llada2_moe
from diffray.components.models.llada_moe import build_llada_moe

Build = Callable[[Config, Mesh, torch.dtype], Denoiser]

ARCHITECTURES: dict[str, Build] = {
    "LLaDAModelLM": build_llada,
    "LLaDAMoEModelLM": build_llada_moe,
    "FusedLLaDAMoEModelLM": build_llada_moe,
    "LLaDA2MoeModelLM": build_llada2_moe,
}


def choose_build(config: Config) -> Build:
    """Return the builder of the config's architecture.

    A config without `architectures` is told by its keys: dense LLaDA and LLaDA-MoE share one
    `model_type`.
    """
    architectures = config.get("architectures")
    model_type = config.get("model_type")
    if isinstance(architectures, list) and architectures:
        for name in architectures:
            if name in ARCHITECTURES:
                return ARCHITECTURES[name]
    elif model_type in ("llada2_moe", "llada2_moe_veomni"):
        return build_llada2_moe
    elif model_type == "llada":
        return build_llada_moe if "num_experts" in config else build_llada
    raise ValueError(
        f"config.json names the architectures {architectures!r} (model_type {model_type!r}); "
        f"supported are {', '.join(ARCHITECTURES)}"
    )
