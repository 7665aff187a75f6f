"""Writes random checkpoints in four layouts (LLaDA, LLaDA-MoE, LLaDA2, SDAR) to measure speed with.

    python -m benchmarks.random_checkpoint /tmp/llada-100m
    python -m benchmarks.random_checkpoint /tmp/moe --layout llada_moe --layers 4 --dtype bfloat16

The config.json is that of the layout's golden checkpoint with other sizes; the defaults make about
100 M parameters. Weights are normal with deviation gain / sqrt(inputs). The gains make attention
selective and spread confidences between 0 and 1, so that threshold decoding takes several steps per
block, neither one nor as many as there are positions. `--tokenizer` adds one, trained on the
sources of Python's library, and `--adapters N` writes LoRA adapters for all linear layers of the
blocks to FOLDER/adapter-0 and so on.
"""

import argparse
import json
import math
import re
import sysconfig
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from diffray.components.mesh import Mesh
from diffray.components.models.registry import choose_build

GOLDEN = Path(__file__).parents[1] / "tests" / "golden"


@dataclass(frozen=True, slots=True)
class Shape:
    """The sizes of a model; the last two ids are the mask and the end of text."""

    hidden: int = 640
    layers: int = 12
    heads: int = 10
    kv_heads: int = 10
    mlp: int = 1792
    vocab: int = 32000
    experts: int = 16
    expert_mlp: int = 224


SIZES = "hidden layers heads kv_heads mlp experts expert_mlp".split()
_SPARSE = "hidden_size num_hidden_layers num_attention_heads num_key_value_heads".split()
# The names of the sizes in config.json.
LAYOUTS = {
    "llada": "d_model n_layers n_heads n_kv_heads mlp_hidden_size".split(),
    "llada_moe": [*_SPARSE, "dense_intermediate_size", "num_experts", "expert_intermediate_size"],
    "llada2_moe": [*_SPARSE, "intermediate_size", "num_experts", "moe_intermediate_size"],
    "sdar": [*_SPARSE, "intermediate_size"],
}
QUERY_KEY_GAIN = 1.5
# Where a model normalizes queries and keys, their norms carry the gain; LLaDA's matrices do.
QUERY_KEYS = ("q_proj", "k_proj")
QUERY_KEY_NORMS = ("q_norm", "k_norm", "query_layernorm", "key_layernorm")
ADAPTED = re.compile(r"(blocks|layers)\..*(?<!\.gate)\.weight$")  # all but routers
HEADS = ("lm_head.weight", "model.transformer.ff_out.weight")


def config_of(layout: str, shape: Shape) -> dict[str, Any]:
    """Return the config.json of a layout with these sizes."""
    config: dict[str, Any] = json.loads((GOLDEN / layout / "config.json").read_text())
    sizes = zip(SIZES, LAYOUTS[layout], strict=False)  # a dense model has no experts
    config |= {name: getattr(shape, size) for size, name in sizes}
    end = shape.vocab - 1
    config |= {"vocab_size": shape.vocab, "mask_token_id": end - 1}
    config |= {"eos_token_id": end, "pad_token_id": end}
    if layout == "llada":
        return config | {"embedding_size": shape.vocab, "max_sequence_length": 4096}
    if layout == "llada_moe":
        return config | {
            "num_experts_per_tok": min(8, shape.experts),
            "moe_layer_freq": [1] * shape.layers,
            "max_position_embeddings": 8192,
        }
    config["head_dim"] = shape.hidden // shape.heads
    if layout == "sdar":
        return config
    groups = math.gcd(8, max(shape.experts // 2, 1))  # a group is judged by its two best
    return config | {
        "num_experts_per_tok": min(8, shape.experts // 2),
        "n_group": groups,
        "topk_group": max(1, groups // 2),
        "max_position_embeddings": 16384,
    }


def draw_weights(
    config: dict[str, Any], draw: Callable[[str, tuple[int, ...]], Tensor]
) -> dict[str, Tensor]:
    """Draw every tensor that the model of a config needs, in the published layout."""
    parts = choose_build(config)(config, Mesh(), torch.float32).parts(set())
    return {name: draw(name, part.shape) for name, part in parts.items() if not part.optional}


def gain(name: str, config: dict[str, Any], head_gain: float) -> float:
    """Return a matrix's gain, or the value of a norm's weight or a bias."""
    part = name.removesuffix(".weight").rpartition(".")[2]
    if part in ("wte", "embed_tokens", "word_embeddings"):
        return math.sqrt(config.get("d_model") or config["hidden_size"])
    if name in HEADS:
        return head_gain
    if part in QUERY_KEY_NORMS or (part in QUERY_KEYS and "d_model" in config):
        return QUERY_KEY_GAIN
    return 0.0 if part.endswith("bias") else 1.0


def write(
    folder: Path,
    config: dict[str, Any],
    *,
    seed: int,
    dtype: torch.dtype,
    head_gain: float = 12.0,
    never: slice | None = None,
) -> int:
    """Write config.json and model.safetensors to `folder`; return the number of parameters.

    The head's rows of the ids `never`, by default the mask's, are 0, so these are never the best.
    """
    from safetensors.torch import save_file  # configs are made without it

    mask = config["mask_token_id"]
    never = never or slice(mask, mask + 1)
    generator = torch.Generator().manual_seed(seed)

    def draw(name: str, size: tuple[int, ...]) -> Tensor:
        own = gain(name, config, head_gain)
        if len(size) == 1:
            return torch.full(size, own, dtype=dtype)
        deviation = own / math.sqrt(size[-1])
        weights = torch.empty(size).normal_(0, deviation, generator=generator).to(dtype)
        if name in HEADS:
            weights[never] = 0
        return weights

    tensors = draw_weights(config, draw)
    folder.mkdir(parents=True, exist_ok=True)
    config = config | {"torch_dtype": str(dtype).removeprefix("torch.")}
    (folder / "config.json").write_text(json.dumps(config, indent=1) + "\n")
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return sum(tensor.numel() for tensor in tensors.values())


def add_tokenizer(folder: Path, size: int) -> None:
    """Write a byte-level BPE tokenizer whose end token is the last id."""
    from tokenizers import ByteLevelBPETokenizer
    from transformers import PreTrainedTokenizerFast

    trained = ByteLevelBPETokenizer()
    sources = sorted(map(str, Path(sysconfig.get_path("stdlib")).glob("*.py")))
    trained.train(sources, vocab_size=size - 2, show_progress=False)
    made = PreTrainedTokenizerFast(tokenizer_object=trained._tokenizer)
    made.add_tokens([f"<unused {number}>" for number in range(size - 2 - len(made))])
    made.add_special_tokens({"mask_token": "<mask>", "eos_token": "<end>"})
    made.save_pretrained(folder)


def add_adapters(folder: Path, count: int, rank: int) -> None:
    """Write LoRA adapters for a checkpoint that is one file."""
    from safetensors import safe_open
    from safetensors.torch import save_file

    with safe_open(folder / "model.safetensors", "pt") as file:
        shapes = {name: file.get_slice(name).get_shape() for name in file.keys()}  # noqa: SIM118
    layers = {n: s for n, s in shapes.items() if ADAPTED.search(n) and len(s) == 2}
    for number in range(count):
        tensors = {}
        for name, (rows, columns) in layers.items():
            base = f"base_model.model.{name.removesuffix('.weight')}"
            tensors[f"{base}.lora_A.weight"] = torch.randn(rank, columns) * 0.1
            tensors[f"{base}.lora_B.weight"] = torch.randn(rows, rank) * 0.1
        path = folder / f"adapter-{number}"
        path.mkdir(exist_ok=True)
        save_file(tensors, path / "adapter_model.safetensors")
        config = {"peft_type": "LORA", "r": rank, "lora_alpha": rank}
        (path / "adapter_config.json").write_text(json.dumps(config))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--layout", choices=LAYOUTS, default="llada")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--head-gain", type=float, default=12.0, help="more: higher confidences")
    names = Shape.__dataclass_fields__
    for name, field in names.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=field.default)
    parser.add_argument("--tokenizer", action="store_true", help="add one")
    parser.add_argument("--adapters", type=int, default=0, help="LoRA adapters to add")
    parser.add_argument("--rank", type=int, default=16, help="of the adapters")
    args = parser.parse_args()
    config = config_of(args.layout, Shape(**{name: getattr(args, name) for name in names}))
    dtype = getattr(torch, args.dtype)
    count = write(args.folder, config, seed=args.seed, dtype=dtype, head_gain=args.head_gain)
    if args.tokenizer:
        add_tokenizer(args.folder, args.vocab)
    add_adapters(args.folder, args.adapters, args.rank)
    print(f"{args.folder}: {args.layout}, {count / 1e6:.1f} M parameters")


if __name__ == "__main__":
    main()
