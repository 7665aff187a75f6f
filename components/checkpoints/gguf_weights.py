"""The tensors of a GGUF file, under the names of the original checkpoint.

llama.cpp's converter permutes the rows of queries and keys that rotary embeddings pair; reading
undoes it by whole rows, so blocks stay as they are.
"""

import math
import re
from typing import Final

import torch
from torch import Tensor

from diffray.components.checkpoints.folder import CheckpointError
from diffray.components.checkpoints.gguf import ROPE_FACTORS, Gguf
from diffray.components.checkpoints.weights import FLOATS, Stored
from diffray.components.layers import Index
from diffray.components.models import llada, qwen
from diffray.components.quantization import Scheme
from diffray.components.quantized_parts import module_of
from diffray.kernels.formats import BLOCKS
from diffray.kernels.quantize import Quantized, pack_nibbles

_NAMES: Final = {
    "llama": (qwen.QWEN2, qwen.MLP_NAMES),
    "qwen2": (qwen.QWEN2, qwen.MLP_NAMES),
    "qwen3": (qwen.QWEN3, qwen.MLP_NAMES),
    "dream": (qwen.QWEN2, qwen.MLP_NAMES),
    "llada": (llada.NAMES, llada.MLP_NAMES),
    "llada-moe": (qwen.QWEN3, qwen.MLP_NAMES),
}
_LAYER: Final = re.compile(r"blk\.([0-9]{1,4})\.([a-z_]+\.[a-z]+)")


class GGUFFile:
    """A GGUF file; reads only the requested rows, which are never mapped."""

    def __init__(self, gguf: Gguf) -> None:
        self.path, self._gguf = gguf.path, gguf
        self._theirs = _renamed(gguf)
        kinds = {ours: gguf.tensors[name].kind for ours, name in self._theirs.items()}
        self._forms = {ours: BLOCKS[kind] for ours, kind in kinds.items() if kind in BLOCKS}
        self.tensors = {
            ours: Stored(gguf.tensors[name].shape, "F32" if ours in self._forms else kinds[ours])
            for ours, name in self._theirs.items()
        }
        stored = {module_of(ours): form for ours, form in self._forms.items()}
        self.scheme = Scheme("the checkpoint's own", stored=stored) if stored else None

    def read(self, name: str, index: Index) -> Tensor | Quantized:
        shape, dtype = self.tensors[name]
        raw = self._rows(self._theirs[name], index[: len(shape) - 1])
        if (form := self._forms.get(name)) is None:
            found = raw.view(FLOATS[dtype])
            return found[..., index[-1]] if len(index) == found.dim() else found
        blocks = raw.unflatten(-1, (form.scales_of(shape[-1]), -1))
        width = form.group * form.bits // 8
        head, body = blocks.split([blocks.shape[-1] - width, width], dim=-1)
        halves = head.contiguous().view(torch.float16)
        if form.bits == 8:
            values = body.flatten(-2).view(torch.int8)
        else:  # the first half of a block is in the low halves of its bytes
            values = pack_nibbles(torch.cat([body & 15, body >> 4], dim=-1).flatten(-2))
        return Quantized(form, values, halves[..., 0], halves[..., 1] if form.has_minimum else None)

    def _rows(self, name: str, index: Index) -> Tensor:
        """Return the bytes of some rows, in the original order."""
        tensor, head = self._gguf.tensors[name], self._gguf.head_rows(name)
        outer = tensor.shape[:-1]
        chosen = [range(size)[part] for size, part in zip(outer, index, strict=False)]
        chosen += [range(size) for size in outer[len(chosen) :]]
        first = chosen[0] if outer else range(1)
        inner = math.prod(outer[1:])
        start, stop = first.start * inner, first.stop * inner
        if head:
            start, stop = start // head * head, -(-stop // head) * head
        raw = torch.empty((stop - start, tensor.row_bytes), dtype=torch.uint8)
        with self.path.open("rb") as file:
            file.seek(tensor.start + start * tensor.row_bytes)
            if file.readinto(raw.numpy().data) != raw.numel():
                raise CheckpointError(f"{self.path} is shorter than before; download it again")
        if head:  # the rows of a head's halves alternate there
            row = torch.arange(first.start, first.stop)
            half, at = row % head // (head // 2), row % (head // 2)
            raw = raw[row // head * head + 2 * at + half - start]
        if len(outer) == 2:
            raw = raw.view(len(first), inner, -1)[:, chosen[1].start : chosen[1].stop]
        return raw if outer else raw[0]


def _renamed(gguf: Gguf) -> dict[str, str]:
    """Return the tensors by the original names; unknown ones keep theirs, and are refused later."""
    names, mlp = _NAMES[gguf.architecture]
    whole = {
        "token_embd.weight": names.embedding,
        "output_norm.weight": names.last_norm,
        "output.weight": names.head,
    }
    in_layer = {
        "attn_norm.weight": names.attention_norm,
        "attn_output.weight": names.attention_out,
        "ffn_norm.weight": names.mlp_norm,
        "ffn_gate.weight": mlp.gate,
        "ffn_up.weight": mlp.up,
        "ffn_down.weight": mlp.down,
        "ffn_gate_inp.weight": "mlp.gate.weight",
        **{
            f"ffn_{part}_exps.weight": f"mlp.experts.{part}_proj" for part in ("gate", "up", "down")
        },
        **dict(zip(("attn_q.weight", "attn_k.weight", "attn_v.weight"), names.qkv, strict=True)),
        **dict(zip(("attn_q.bias", "attn_k.bias", "attn_v.bias"), names.qkv_bias, strict=False)),
        **dict(zip(("attn_q_norm.weight", "attn_k_norm.weight"), names.head_norms, strict=False)),
    }
    found = {}
    for name in gguf.tensors.keys() - {ROPE_FACTORS}:
        match = _LAYER.fullmatch(name)
        if match and match[2] in in_layer:
            found[f"{names.layer}.{match[1]}.{in_layer[match[2]]}"] = name
        else:
            found[whole.get(name, name)] = name
    return found
