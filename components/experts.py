"""Routed experts as a layer: whole experts or slices on this rank, in every known layout.

Letters: T packed tokens, A those of one adapter, P those of an expert, H hidden size, E experts
here, I intermediate size here (F = 2I: up rows, then gate rows), K experts of a token.
"""

from collections.abc import Collection
from typing import ClassVar, Protocol

import torch
from torch import Tensor, nn
from torch.nn.functional import silu

from diffray.components.layers import GatedMLP, Norm, Part, Parts, Piece, cut
from diffray.components.lora import LoRA
from diffray.components.low_rank import Adapted
from diffray.components.mesh import Mesh
from diffray.components.weight import Weight
from diffray.kernels.choose import Kernels
from diffray.kernels.experts import Activation, ExpertWeights, run_experts
from diffray.kernels.router import Routing


class Router(Protocol):
    """Chooses experts; sparse models differ only in this."""

    def __call__(self, x_TH: Tensor) -> Routing: ...

    def parts(self, prefix: str) -> Parts: ...


class SparseMLP(nn.Module):
    """The chosen experts of each token and a shared one, with one all-reduce."""

    routed: ClassVar[bool] = True

    def __init__(
        self, router: Router, experts: "Experts", shared: GatedMLP | None, mesh: Mesh
    ) -> None:
        super().__init__()
        self.mesh = mesh
        self.router = router
        self.experts = experts
        self.shared = shared

    def forward(self, x_TH: Tensor) -> Tensor:
        return self.mesh.all_reduce(self.partial(x_TH))

    def partial(self, x_TH: Tensor) -> Tensor:
        """Return this rank's partial sum."""
        out_TH: Tensor = self.experts(x_TH, self.router(x_TH))
        return out_TH if self.shared is None else out_TH + self.shared.partial(x_TH)

    def add_norm(self, x_TH: Tensor, residual_TH: Tensor, norm: Norm) -> tuple[Tensor, Tensor]:
        """Return the next residual, which is the output plus this one, and its norm."""
        if self.mesh.size > 1:
            return norm(self(x_TH), residual_TH)  # type: ignore[no-any-return]
        routing = self.router(x_TH)
        shared_TH = None if self.shared is None else self.shared.partial(x_TH)
        return self.experts.add_norm(x_TH, routing, shared_TH, residual_TH, norm)

    def pack(self) -> None:
        """Pack the shared expert; the others are read in slices, unpacked."""
        if self.shared is not None:
            self.shared.pack()

    def parts(self, prefix: str, names: Collection[str]) -> Parts:
        shared = {} if self.shared is None else self.shared.parts(prefix, names)
        return self.router.parts(prefix) | self.experts.parts(f"{prefix}.mlp", names) | shared


class Experts(nn.Module):
    """Gated experts; they return this rank's partial sum of the layer's output."""

    def __init__(
        self,
        num_experts: int,
        hidden: int,
        intermediate: int,
        mesh: Mesh,
        dtype: torch.dtype,
        kernels: Kernels,
        activation: Activation = silu,
    ) -> None:
        super().__init__()
        alone = Mesh()
        self.hidden, self.kernels, self.activation = hidden, kernels, activation
        self.experts = cut(mesh if mesh.expert_parallel else alone, num_experts, "the experts")
        self.width = cut(
            alone if mesh.expert_parallel else mesh, intermediate, "the experts' intermediate size"
        )
        num_here = self.experts.stop - self.experts.start
        width = self.width.stop - self.width.start
        self.w31 = Weight("experts", num_here, 2 * width, hidden, dtype=dtype)
        self.w2 = Weight("experts", num_here, hidden, width, dtype=dtype)

    @property
    def weights(self) -> ExpertWeights:
        return ExpertWeights(self.w31.stored, self.w2.stored, self.activation)

    @property
    def _adapted(self) -> list[Adapted]:
        """The tokens of this forward whose adapters change experts."""
        found = {a.lora: a for w in (self.w31, self.w2) if w.lora for a in w.lora.adapted}
        return list(found.values())

    def forward(self, x_TH: Tensor, routing: Routing) -> Tensor:
        own, adapted = routing.of(self.experts.start, self.experts.stop), self._adapted
        if not adapted:
            return self.kernels.experts(x_TH, self.weights, own)
        # Rows without an adapter stay the same, bit for bit; without such rows, skip this pass.
        some = sum(len(each.tokens_A) for each in adapted) < len(x_TH)
        out_TH = self.kernels.experts(x_TH, self.weights, own) if some else torch.empty_like(x_TH)
        for lora, tokens_A, _ in adapted:
            chosen = own.ids_TK[tokens_A], own.weights_TK[tokens_A]
            out_TH.index_copy_(0, tokens_A, self._with(lora, x_TH[tokens_A], *chosen))
        return out_TH

    def _with(self, lora: LoRA, x_AH: Tensor, ids_AK: Tensor, weights_AK: Tensor) -> Tensor:
        """Return the output of one adapter's rows, computed by torch, one expert at a time."""

        def one(expert: int, x_PH: Tensor) -> Tensor:
            both_PF = self.w31.adapted_product(x_PH, expert, lora)
            up_PI, gate_PI = both_PF.chunk(2, dim=-1)
            x_PI = self.activation(gate_PI).mul_(up_PI)
            return self.w2.adapted_product(x_PI, expert, lora)

        return run_experts(x_AH, one, len(self.w2.stored), ids_AK, weights_AK)

    def add_norm(
        self,
        x_TH: Tensor,
        routing: Routing,
        shared_TH: Tensor | None,
        residual_TH: Tensor,
        norm: Norm,
    ) -> tuple[Tensor, Tensor]:
        """Return the sum of the output, a shared expert's and the residual, and its norm."""
        if self._adapted:
            out_TH = self(x_TH, routing)
            out_TH = out_TH if shared_TH is None else out_TH + shared_TH
            return norm(out_TH, residual_TH)  # type: ignore[no-any-return]
        added = shared_TH, residual_TH, norm.weight, norm.eps
        return self.kernels.experts_add_norm(x_TH, self.weights, routing, *added)

    def parts(self, prefix: str, names: Collection[str]) -> Parts:
        """Return the parts in the layout indicated by the checkpoint's names.

        `prefix` is the layer's name, such as "model.layers.0.mlp".
        """
        if f"{prefix}.w1" in names:
            return self.fused_parts(prefix)
        if f"{prefix}.experts.gate_proj" in names:
            return self._merged_parts(prefix)
        return self.single_parts(prefix)

    def fused_parts(self, prefix: str, gate_up: str = "w1", down: str = "w2") -> Parts:
        """Return two parts: the gate and up rows of all experts, and their down matrices."""
        up_EIH, gate_EIH = self.w31.stored.chunk(2, dim=1)
        total, width = self.experts.rows, self.width.rows
        chosen = slice(self.experts.start, self.experts.stop)
        gate_rows = slice(self.width.start, self.width.stop)
        up_rows = slice(width + self.width.start, width + self.width.stop)
        w1 = (Piece(gate_EIH, (chosen, gate_rows)), Piece(up_EIH, (chosen, up_rows)))
        w2 = (Piece(self.w2.stored, (chosen, slice(None), gate_rows)),)
        return {
            f"{prefix}.{gate_up}": Part((total, 2 * width, self.hidden), w1, weight=self.w31),
            f"{prefix}.{down}": Part((total, self.hidden, width), w2, weight=self.w2),
        }

    def _merged_parts(self, prefix: str) -> Parts:
        """gate_proj, up_proj, down_proj: one tensor of all experts each."""
        up_EIH, gate_EIH = self.w31.stored.chunk(2, dim=1)
        total, width = self.experts.rows, self.width.rows
        chosen = slice(self.experts.start, self.experts.stop)
        rows = slice(self.width.start, self.width.stop)
        wide, tall = (total, width, self.hidden), (total, self.hidden, width)
        gate, up = ((Piece(view, (chosen, rows)),) for view in (gate_EIH, up_EIH))
        down = (Piece(self.w2.stored, (chosen, slice(None), rows)),)
        return {
            f"{prefix}.experts.gate_proj": Part(wide, gate, weight=self.w31),
            f"{prefix}.experts.up_proj": Part(wide, up, weight=self.w31),
            f"{prefix}.experts.down_proj": Part(tall, down, weight=self.w2),
        }

    def single_parts(self, prefix: str) -> Parts:
        """Three matrices per expert, as in the published checkpoints."""
        up_EIH, gate_EIH = self.w31.stored.chunk(2, dim=1)
        rows = slice(self.width.start, self.width.stop)
        wide, tall = (self.width.rows, self.hidden), (self.hidden, self.width.rows)
        w2_EHI = self.w2.stored
        parts: Parts = {}
        for expert in range(self.experts.rows):
            name = f"{prefix}.experts.{expert}"
            here = expert - self.experts.start
            if 0 <= here < len(w2_EHI):
                gate: tuple[Piece, ...] = (Piece(gate_EIH[here], (rows,)),)
                up: tuple[Piece, ...] = (Piece(up_EIH[here], (rows,)),)
                down: tuple[Piece, ...] = (Piece(w2_EHI[here], (slice(None), rows)),)
            else:
                gate = up = down = ()
            parts[f"{name}.gate_proj.weight"] = Part(wide, gate, weight=self.w31)
            parts[f"{name}.up_proj.weight"] = Part(wide, up, weight=self.w31)
            parts[f"{name}.down_proj.weight"] = Part(tall, down, weight=self.w2)
        return parts
