"""Random LoRA adapters in PEFT's folders, and checkpoints with their products added."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from diffray.components.checkpoints.folder import resolve
from tests.helpers.tiny_checkpoints import LLADA, random_weights, save

_NEVER = ("wte", "embed", "ff_out.weight", "lm_head", "gate.weight", "norm")


def modules_of(weights: dict[str, Tensor]) -> list[str]:
    names = [name for name, tensor in weights.items() if tensor.dim() == 2]
    kept = [n for n in names if not any(word in n for word in _NEVER)]
    kept += [n for n in names if "blocks." in n and n.endswith("ff_out.weight")]
    return [name.removesuffix(".weight") for name in kept]


def write_adapter(
    folder: Path,
    weights: dict[str, Tensor],
    modules: list[str],
    *,
    seed: int = 1,
    rank: int = 3,
    size: float = 0.3,
    **config: Any,
) -> Path:
    torch.manual_seed(seed)
    tensors: dict[str, Tensor] = {}
    for module in modules:
        rows, columns = weights[f"{module}.weight"].shape
        name = f"base_model.model.{module}"
        tensors[f"{name}.lora_A.weight"] = torch.randn(rank, columns, dtype=torch.float64) * size
        tensors[f"{name}.lora_B.weight"] = torch.randn(rows, rank, dtype=torch.float64) * size
    folder.mkdir(parents=True)
    save_file(tensors, folder / "adapter_model.safetensors")
    settings = {"peft_type": "LORA", "r": rank, "lora_alpha": 2 * rank, "bias": "none", **config}
    (folder / "adapter_config.json").write_text(json.dumps(settings))
    return folder


def merged(weights: dict[str, Tensor], adapter: Path, scale: float = 2.0) -> dict[str, Tensor]:
    tensors = load_file(adapter / "adapter_model.safetensors")
    added = dict(weights)
    for name in tensors:
        if name.endswith(".lora_A.weight"):
            base = name.removesuffix(".lora_A.weight")
            module = base.removeprefix("base_model.model.") + ".weight"
            product = tensors[f"{base}.lora_B.weight"] @ tensors[name]
            added[module] = weights[module] + scale * product
    return added


def adapter_of(model: str, folder: Path, **config: Any) -> Path:
    weights = load_file(resolve(model) / "model.safetensors")
    return write_adapter(folder, weights, modules_of(weights), **config)


class Story:
    """A checkpoint of random weights, adapters for it, and checkpoints with them merged."""

    def __init__(self, folder: Path, config: dict[str, Any] = LLADA, adapters: int = 3) -> None:
        self.weights = random_weights(config)
        self.base = save(folder / "base", config, self.weights)
        every = modules_of(self.weights)
        self.adapters: dict[str, str] = {}
        self.merged: dict[str, Path] = {"": self.base}
        for number in range(adapters):
            name, modules = f"a{number}", every[:: number + 1]
            made = write_adapter(folder / name, self.weights, modules, seed=number, rank=2 + number)
            self.adapters[name] = str(made)
            both = merged(self.weights, made)
            self.merged[name] = save(folder / f"merged {name}", config, both)
