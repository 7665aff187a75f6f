"""GGUF files made from tiny checkpoints, as llama.cpp's converter makes them."""

import json
from pathlib import Path
from typing import Any, Final

import gguf
import numpy as np
import torch
from safetensors.torch import load_file, save_file
from tokenizers.pre_tokenizers import ByteLevel
from torch import Tensor

from tests.helpers.paths import GOLDEN

ARCHITECTURES: Final = {
    "ar_llama": "llama",
    "ar_qwen3": "qwen3",
    "dream": "dream",
    "llada": "llada",
    "llada_moe": "llada-moe",
}
_LLADA: Final = {
    "d_model": "hidden_size",
    "n_heads": "num_attention_heads",
    "n_kv_heads": "num_key_value_heads",
    "n_layers": "num_hidden_layers",
    "mlp_hidden_size": "intermediate_size",
    "max_sequence_length": "max_position_embeddings",
}
_MERGES: Final = (
    "h e|\u0120 t|\u0120t he|1 2|12 3|123 4|\u0120 1|\u010a \u010a|\u0120 \u0120|! \u010a|' s|' S|"
    "I t|It 's|. a|A B|AB C|\u0120 !"
).split("|")
_MERGED: Final = ["".join(merge.split()) for merge in _MERGES]
_BYTES: Final = sorted(ByteLevel.alphabet())
_WORDS: Final = [f"word{number}" for number in range(509 - len(_BYTES) - len(_MERGED))]
TOKENS: Final = [*_BYTES, *_MERGED, *_WORDS, "<s>", "<|mask|>", "<|end|>"]
MERGES: Final = [(first, last) for first, last in map(str.split, _MERGES)]


def config_of(family: str) -> dict[str, Any]:
    """Return a golden model's config; Llama's scaling is the one that published models have."""
    config: dict[str, Any] = json.loads((GOLDEN / family / "config.json").read_text())
    if family == "ar_llama":
        config["rope_scaling"]["original_max_position_embeddings"] = 8192
    return config


def weights_of(family: str) -> dict[str, Tensor]:
    files = sorted((GOLDEN / family).glob("*.safetensors"))
    return {name: tensor for file in files for name, tensor in load_file(file).items()}


def rounded(weights: dict[str, Tensor], kind: str) -> dict[str, Tensor]:
    """Return the weights as a file of this type gives them back."""
    number = gguf.GGMLQuantizationType[kind]
    found = {}
    for name, tensor in weights.items():
        found[name] = tensor
        if tensor.dim() == 2 and not name.endswith("mlp.gate.weight"):
            stored = gguf.quants.quantize(tensor.float().numpy(), number)
            found[name] = torch.from_numpy(gguf.quants.dequantize(stored, number).copy())
    return found


def save(folder: Path, config: dict[str, Any], weights: dict[str, Tensor]) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    save_file(weights, folder / "model.safetensors")
    return folder


def write(path: Path, family: str, kind: str = "F32", fields: dict[str, Any] | None = None) -> Path:
    """Write a golden model; `fields` replace metadata, or remove it where they are None."""
    architecture, config = ARCHITECTURES[family], config_of(family)
    config = {_LLADA.get(key, key): value for key, value in config.items()}
    writer = gguf.GGUFWriter(path, architecture)
    for key, value in (_metadata(architecture, config) | (fields or {})).items():
        _add(writer, key, value)
    weights = _stacked(weights_of(family))
    heads = config["num_attention_heads"], config["num_key_value_heads"]
    arch = next(a for a, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
    names = gguf.get_tensor_name_map(arch, config["num_hidden_layers"])
    for name, tensor in weights.items():
        found = names.get_name(name, try_suffixes=(".weight", ".bias"))
        assert found is not None, name
        array = tensor.float().numpy()
        if architecture in ("llama", "llada") and ("q_proj" in name or "k_proj" in name):
            array = permute(array, heads["k_proj" in name])
        number = gguf.GGMLQuantizationType[kind]
        if array.ndim == 1 or "mlp.gate.weight" in name:
            number = gguf.GGMLQuantizationType.F32
        writer.add_tensor(found, gguf.quants.quantize(array, number), raw_dtype=number)
    if architecture == "llama":
        writer.add_tensor("rope_freqs.weight", _llama3_factors(config))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def permute(rows: "np.ndarray[Any, Any]", heads: int) -> "np.ndarray[Any, Any]":
    halves = rows.reshape(heads, 2, len(rows) // heads // 2, *rows.shape[1:])
    return halves.swapaxes(1, 2).reshape(rows.shape)


def _stacked(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """Stack experts, which are separate in the checkpoint and one tensor in the file."""
    found: dict[str, Any] = {}
    for name, tensor in weights.items():
        head, inside, tail = name.partition(".experts.")
        joined = f"{head}.experts.{tail.split('.', 1)[1]}" if inside else name
        found.setdefault(joined, []).append((int(tail.split(".")[0]) if inside else 0, tensor))
    return {
        name: torch.stack([t for _, t in sorted(parts, key=lambda part: part[0])])
        if ".experts." in name
        else parts[0][1]
        for name, parts in found.items()
    }


def _llama3_factors(config: dict[str, Any]) -> "np.ndarray[Any, Any]":
    scaling, half = config["rope_scaling"], config["hidden_size"] // 4 // 2
    factors = []
    for at in range(half):
        wave = 2 * np.pi * config["rope_theta"] ** (at / half)
        old = scaling["original_max_position_embeddings"]
        smooth = (old / wave - 1.0) / (4.0 - 1.0)
        if wave < old / 4.0:
            factors.append(1.0)
        elif wave > old / 1.0:
            factors.append(scaling["factor"])
        else:
            factors.append(1 / ((1 - smooth) / scaling["factor"] + smooth))
    return np.array(factors, dtype=np.float32)


def _metadata(architecture: str, config: dict[str, Any]) -> dict[str, Any]:
    own = {
        "block_count": config["num_hidden_layers"],
        "context_length": config["max_position_embeddings"],
        "embedding_length": config["hidden_size"],
        "feed_forward_length": config.get("intermediate_size", 128),
        "attention.head_count": config["num_attention_heads"],
        "attention.head_count_kv": config["num_key_value_heads"],
        "attention.layer_norm_rms_epsilon": config["rms_norm_eps"],
        "rope.freq_base": float(config["rope_theta"]),
        "attention.key_length": config.get("head_dim"),
        "expert_count": config.get("num_experts"),
        "expert_used_count": config.get("num_experts_per_tok"),
        "expert_feed_forward_length": config.get("expert_intermediate_size"),
    }
    masked = architecture not in ("llama", "qwen3")
    return {f"{architecture}.{key}": value for key, value in own.items()} | {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": TOKENS,
        "tokenizer.ggml.token_type": [1] * 509 + [3] * 3,
        "tokenizer.ggml.merges": _MERGES,
        "tokenizer.ggml.bos_token_id": 509,
        "tokenizer.ggml.mask_token_id": 510 if masked else None,
        "tokenizer.ggml.eos_token_id": 511,
        "tokenizer.chat_template": "{% for m in messages %}{{ m['content'] }}{% endfor %}",
    }


def _add(writer: gguf.GGUFWriter, key: str, value: object) -> None:
    match value:
        case bool():
            writer.add_bool(key, value)
        case int():
            writer.add_uint32(key, value)
        case float():
            writer.add_float32(key, value)
        case str():
            writer.add_string(key, value)
        case list():
            writer.add_array(key, value)
