"""A stack that runs twice: over masks as a denoiser, and over final tokens as an encoder.

Both passes have the same weights except for a scale of each layer. The denoiser's inputs carry what
it expected in the previous step (self-conditioning), the encoder's do not. Logits are soft-capped.

Letters: T packed tokens, R rows of the head, H hidden size, V this rank's vocabulary, K ids.
"""

from collections.abc import Collection
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor, nn

from diffray.components.batch import Batch
from diffray.components.denoiser import Denoiser, Names, OwnStack
from diffray.components.dims import Dims
from diffray.components.image import Sight
from diffray.components.layers import GatedMLP, Parts, whole, wide
from diffray.components.mesh import Mesh
from diffray.components.model_spec import Denoising
from diffray.components.sandwich import SandwichLayer, WideNorm
from diffray.components.vision import Vision
from diffray.kernels.choose import Kernels
from diffray.kernels.confidence import Confidence, Draw
from diffray.kernels.norm import rms_norm_wide


class SelfConditioning(nn.Module):
    """Adds an MLP of the expected embedding to a mask's embedding, and norms the sum."""

    def __init__(self, mlp: GatedMLP, hidden: int, eps: float, dtype: torch.dtype) -> None:
        super().__init__()
        self.mlp, self.eps = mlp, eps
        self.norm = WideNorm(hidden, eps, dtype)

    def forward(self, x_TH: Tensor, soft_TH: Tensor) -> Tensor:
        signal_TH: Tensor = self.mlp(self.norm.of(soft_TH))
        return rms_norm_wide(x_TH + signal_TH, None, self.eps)

    def parts(self, prefix: str) -> Parts:
        norm = {f"{prefix}.pre_norm.weight": self.norm.part()}
        return norm | self.mlp.parts(prefix, ())


class Around(NamedTuple):
    """What such a model has beside its stack."""

    encoder: str  # the checkpoint's prefix of tensors that only the encoder has
    vision: Vision
    sight: Sight
    prefix: str  # of the tensors of `conditioning`
    conditioning: SelfConditioning
    cap: float  # of logits


class TwoPass(Denoiser):
    """A model that runs masks and final tokens differently, possibly in the same forward."""

    def __init__(
        self,
        dims: Dims,
        layers: list[SandwichLayer],
        own: OwnStack,
        names: Names,
        around: Around,
        mesh: Mesh,
        dtype: torch.dtype,
        denoising: Denoising,
        kernels: Kernels,
    ) -> None:
        super().__init__(dims, (), names, mesh, dtype, denoising, kernels, own)
        self.encoder, self.cap, self.vision = around.encoder, around.cap, around.vision
        self.prefix, self.conditioning = around.prefix, around.conditioning
        self.scaled = layers
        shapes = tuple((each.attention.num_keys, each.attention.heads.size) for each in layers)
        self.spec = replace(
            self.spec,
            encodes=True,
            masked=False,
            own_iterations=("renoise",),
            own_shapes=shapes,
            sight=around.sight,
            iteration={"kind": "renoise"},
        )

    def embed(self, ids_T: Tensor) -> Tensor:
        return self._scale(self.embedding.embed(ids_T))

    def look(self, pixels_PC: Tensor, columns: int) -> Tensor:
        soft_SH: Tensor = self.vision(pixels_PC, columns)
        return soft_SH

    def soften(self, x_TH: Tensor, soft_TH: Tensor, batch: Batch) -> Tensor:
        assert batch.masked_T1 is not None
        self.running.adapted = batch.adapted
        return torch.where(batch.masked_T1, self.conditioning(x_TH, soft_TH), x_TH)

    def expected_embedding(self, weights_RV: Tensor) -> Tensor:
        return self._scale(self.embedding.mix(weights_RV))

    def head(self, hidden_RH: Tensor) -> Tensor:
        logits_RV = self.output.logits(hidden_RH)
        logits_RV = logits_RV.to(wide(logits_RV.dtype))
        return torch.tanh(logits_RV / self.cap) * self.cap

    def confidence(
        self,
        hidden_RH: Tensor,
        mask_token_id: int,
        draw: Draw | None,
        known_RK: Tensor | None = None,
    ) -> Confidence:
        gather_RK = self.gathered(hidden_RH, mask_token_id, known_RK)
        logits_RV, choose = self.head(hidden_RH), self.kernels.confidence_of_logits
        return choose(logits_RV, self.output.rows.start, mask_token_id, gather_RK, draw)

    def pack(self) -> None:
        super().pack()
        self.conditioning.mlp.pack()

    def parts(self, names: Collection[str]) -> Parts:
        scales = {
            f"{self.encoder}.language_model.layers.{number}.layer_scalar": whole(
                layer.final_scale_1
            )
            for number, layer in enumerate(self.scaled)
        }
        own = self.conditioning.parts(self.prefix) | self.vision.parts(self.encoder)
        return super().parts(names) | scales | own

    def _scale(self, x_TH: Tensor) -> Tensor:
        # Rounded to the embedding's dtype, as in the original.
        return x_TH * torch.tensor(self.dims.hidden**0.5, dtype=x_TH.dtype).item()
