"""Gemma 4's image encoder: from an image's patches to embeddings in a prompt.

Every rank has all of it. Letters: P patches, S soft tokens, C numbers per patch, D the tower's
hidden size, N heads, H hidden size of the text model.
"""

from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import embedding, gelu, scaled_dot_product_attention

from diffray.components.backend import send
from diffray.components.layers import ColumnLinear, GatedMLP, GatedNames, Parts, cut, whole
from diffray.components.mesh import Mesh
from diffray.components.models.fields import Fields
from diffray.components.sandwich import WideNorm
from diffray.components.weight import empty
from diffray.kernels.linear import linear
from diffray.kernels.norm import rms_norm_wide
from diffray.kernels.rope import rope_angles, rope_frequencies, rotate

_GELU = partial(gelu, approximate="tanh")
_ALONE = Mesh()
_MLP_NAMES = GatedNames(
    "mlp.gate_proj.linear.weight", "mlp.up_proj.linear.weight", "mlp.down_proj.linear.weight"
)
_TOWER, _PROJECTION = "vision_tower", "embed_vision.embedding_projection.weight"


class Eye(NamedTuple):
    """The dimensions and constants of a tower."""

    hidden: int
    width: int
    layers: int
    heads: int
    keys: int
    head_dim: int
    eps: float
    theta: float
    patch: int  # pixels per side
    pool: int  # patches per side that become one soft token
    places: int  # possible positions of a patch in each direction
    standard: bool

    @staticmethod
    def read(fields: Fields) -> "Eye":
        """Read the vision part of config.json; refuse settings that need other arithmetic."""
        fields.only("hidden_activation", "gelu_pytorch_tanh")
        fields.only("attention_bias", False)
        fields.only("use_clipped_linears", False)
        rope = fields.inner("rope_parameters", {})
        rope.only("rope_type", "axial")
        heads = fields.count("num_attention_heads", 12)
        return Eye(
            hidden=fields.count("hidden_size", 768),
            width=fields.count("intermediate_size", 3072),
            layers=fields.count("num_hidden_layers", 16),
            heads=heads,
            keys=fields.count("num_key_value_heads", heads),
            head_dim=fields.count("head_dim", 64),
            eps=fields.number("rms_norm_eps", 1e-6),
            theta=rope.number("rope_theta", 100.0),
            patch=fields.count("patch_size", 16),
            pool=fields.count("pooling_kernel_size", 3),
            places=fields.count("position_embedding_size", 10240),
            standard=fields.flag("standardize", False),
        )


class EyeLayer(nn.Module):
    """Attention of all patches and a gated MLP, each between norms; scale 1."""

    def __init__(self, eye: Eye, dtype: torch.dtype) -> None:
        super().__init__()
        self.eye = eye
        rows, key_rows = (
            cut(_ALONE, number * eye.head_dim, "heads") for number in (eye.heads, eye.keys)
        )
        self.qkv = ColumnLinear("vision", eye.hidden, (rows, key_rows, key_rows), dtype)
        self.out = empty(eye.hidden, rows.rows, dtype=dtype)
        self.mlp = GatedMLP(eye.hidden, eye.width, _MLP_NAMES, _ALONE, dtype, _GELU, part="vision")
        norms = [WideNorm(eye.hidden, eye.eps, dtype) for _ in range(4)]
        self.before, self.after, self.before_mlp, self.after_mlp = norms
        self.query_norm = WideNorm(eye.head_dim, eye.eps, dtype)
        self.key_norm = WideNorm(eye.head_dim, eye.eps, dtype)

    def forward(self, x_PD: Tensor, angles: list[tuple[Tensor, Tensor]]) -> Tensor:
        x_PD = x_PD + self.after.of(self._attend(self.before.of(x_PD), angles))
        return x_PD + self.after_mlp.of(self.mlp(self.before_mlp.of(x_PD)))

    def _attend(self, x_PD: Tensor, angles: list[tuple[Tensor, Tensor]]) -> Tensor:
        eye = self.eye
        heads_PND = self.qkv(x_PD).unflatten(-1, (-1, eye.head_dim))
        q, k, v = heads_PND.split([eye.heads, eye.keys, eye.keys], dim=1)
        q, k = (_turned(each, angles) for each in (self.query_norm.of(q), self.key_norm.of(k)))
        q, k, v = (each.transpose(0, 1) for each in (q, k, rms_norm_wide(v, None, eye.eps)))
        shared = eye.heads > eye.keys
        seen_NPD = scaled_dot_product_attention(q, k, v, scale=1.0, enable_gqa=shared)
        return linear(seen_NPD.transpose(0, 1).flatten(1), self.out)

    def parts(self, prefix: str) -> Parts:
        norms = {
            "input_layernorm": self.before,
            "post_attention_layernorm": self.after,
            "pre_feedforward_layernorm": self.before_mlp,
            "post_feedforward_layernorm": self.after_mlp,
            "self_attn.q_norm": self.query_norm,
            "self_attn.k_norm": self.key_norm,
        }
        projections = zip("qkv", self.qkv.parts(), strict=True)
        attention = f"{prefix}.self_attn"
        return {
            **{f"{prefix}.{name}.weight": norm.part() for name, norm in norms.items()},
            **{f"{attention}.{each}_proj.linear.weight": part for each, part in projections},
            f"{attention}.o_proj.linear.weight": whole(self.out),
            **self.mlp.parts(prefix, ()),
        }


class Vision(nn.Module):
    """The tower, and the projection to the text model's hidden size."""

    def __init__(self, eye: Eye, hidden: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.eye = eye
        self.input_DC = empty(eye.hidden, 3 * eye.patch**2, dtype=dtype)
        self.places_2ND = empty(2, eye.places, eye.hidden, dtype=dtype)
        self.layers = nn.ModuleList([EyeLayer(eye, dtype) for _ in range(eye.layers)])
        self.bias_D = empty(eye.hidden, dtype=dtype) if eye.standard else None
        self.scale_D = empty(eye.hidden, dtype=dtype) if eye.standard else None
        self.out_HD = empty(hidden, eye.hidden, dtype=dtype)

    def forward(self, pixels_PC: Tensor, columns: int) -> Tensor:
        """Return an image's soft tokens [S, H]; its patches, in [0, 1], are rows of `columns`."""
        eye, patches = self.eye, torch.arange(len(pixels_PC), device=pixels_PC.device)
        across_P, down_P = patches % columns, patches // columns
        x_PD = linear((2 * (pixels_PC - 0.5)).to(self.input_DC), self.input_DC)
        x_PD = x_PD + embedding(across_P, self.places_2ND[0])
        x_PD = x_PD + embedding(down_P, self.places_2ND[1])
        turns = send(rope_frequencies(eye.head_dim // 2, eye.theta, 1.0), x_PD.device)
        angles = [rope_angles(across_P, turns), rope_angles(down_P, turns)]
        for layer in self.layers:
            x_PD = layer(x_PD, angles)
        soft_P = across_P // eye.pool + columns // eye.pool * (down_P // eye.pool)
        summed_SD = x_PD.new_zeros(len(patches) // eye.pool**2, eye.hidden, dtype=torch.float32)
        summed_SD.index_add_(0, soft_P, x_PD.float() / eye.pool**2)
        soft_SD = summed_SD * eye.hidden**0.5
        if self.bias_D is not None and self.scale_D is not None:
            soft_SD = (soft_SD - self.bias_D.float()) * self.scale_D.float()
        return linear(rms_norm_wide(soft_SD.to(x_PD), None, eye.eps), self.out_HD)

    def parts(self, prefix: str) -> Parts:
        tower = f"{prefix}.{_TOWER}"
        parts = {
            f"{prefix}.{_PROJECTION}": whole(self.out_HD),
            f"{tower}.patch_embedder.input_proj.weight": whole(self.input_DC),
            f"{tower}.patch_embedder.position_embedding_table": whole(self.places_2ND),
        }
        if self.bias_D is not None and self.scale_D is not None:
            parts[f"{tower}.std_bias"] = whole(self.bias_D)
            parts[f"{tower}.std_scale"] = whole(self.scale_D)
        for number, layer in enumerate(self.layers):
            assert isinstance(layer, EyeLayer)
            parts |= layer.parts(f"{tower}.encoder.layers.{number}")
        return parts


def _turned(x_PND: Tensor, angles: list[tuple[Tensor, Tensor]]) -> Tensor:
    """Rotate the first half of each head by one direction's angles, and the second by the other."""
    halves = zip(x_PND.chunk(2, dim=-1), angles, strict=True)
    return torch.cat([rotate(half, *turn) for half, turn in halves], dim=-1)
