"""Layers that know their shard, so a model built from them reads as single-device code.

Each layer lists its checkpoint tensors as `Part`s, so that loading is a table lookup.
Letters: T packed tokens, H hidden size, O output rows, I input columns, V this rank's vocabulary.
"""

from collections.abc import Collection
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import embedding, silu

from diffray.components.mesh import Mesh
from diffray.components.weight import Weight, empty
from diffray.kernels.choose import Kernels
from diffray.kernels.experts import Activation
from diffray.kernels.quantize import Quantized
from diffray.kernels.quantized import sum_rows
from diffray.kernels.rope import rope_tables
from diffray.kernels.rope_scaling import Rope

Index = tuple[slice, ...]


class Piece(NamedTuple):
    """A view of a parameter, and the slice of the checkpoint tensor that is copied into it."""

    target: Tensor | Quantized
    take: Index


class Part(NamedTuple):
    """One tensor of the checkpoint: its full shape, and the targets of this rank's share.

    Without pieces, this rank holds nothing of it. An optional tensor may be missing; its targets
    are then zero. `weight` is the quantizable matrix that the tensor belongs to, if any.
    """

    shape: tuple[int, ...]
    pieces: tuple[Piece, ...] = ()
    optional: bool = False
    weight: Weight | None = None


Parts = dict[str, Part]


class Cut(NamedTuple):
    """The rows [start, stop) of `rows` that this rank holds."""

    rows: int
    start: int
    stop: int


def cut(mesh: Mesh, rows: int, what: str) -> Cut:
    """Divide `rows` evenly over the mesh."""
    return Cut(rows, *mesh.shard(rows, what))


def wide(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype for computations in at least float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def whole(parameter: Tensor, *, optional: bool = False) -> Part:
    """Return the part for a tensor that every rank holds in full."""
    index = (slice(None),) * parameter.dim()
    return Part(tuple(parameter.shape), (Piece(parameter, index),), optional)


class Norm(nn.Module):
    """RMSNorm over the last dimension of the sum of a residual and the last layer's output."""

    def __init__(self, size: int, eps: float, dtype: torch.dtype, kernels: Kernels) -> None:
        super().__init__()
        self.eps, self.kernels = eps, kernels
        self.weight = empty(size, dtype=dtype)

    def forward(self, x_TH: Tensor, residual_TH: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return the sum, which is the next residual, and its norm."""
        if residual_TH is None:
            return x_TH, self.kernels.rms_norm(x_TH, self.weight, self.eps)
        return self.kernels.add_norm(x_TH, residual_TH, self.weight, self.eps)

    def after(self, x_TI: Tensor, weight_OI: Tensor, residual_TO: Tensor) -> tuple[Tensor, Tensor]:
        """Return the next residual, which is the product plus this one, and its norm."""
        return self.kernels.linear_add_norm(x_TI, weight_OI, residual_TO, self.weight, self.eps)

    def part(self) -> Part:
        return whole(self.weight)


class ColumnLinear(nn.Module):
    """Several matrices with one input in one matmul, each sharded by rows, optionally biased."""

    def __init__(
        self,
        part: str,
        columns: int,
        cuts: tuple[Cut, ...],
        dtype: torch.dtype,
        *,
        biased: bool = False,
    ) -> None:
        super().__init__()
        self.cuts, self.columns = cuts, columns
        self.sizes = [c.stop - c.start for c in cuts]
        self.weight = Weight(part, sum(self.sizes), columns, dtype=dtype)
        self.bias_O = empty(sum(self.sizes), dtype=dtype) if biased else None

    def forward(self, x_TI: Tensor) -> Tensor:
        return self.weight.product(x_TI, self.bias_O)

    def pack(self) -> None:
        self.weight.pack()

    def bias_parts(self) -> list[Part]:
        """Return a part for the bias of each matrix."""
        assert self.bias_O is not None
        return [
            Part((c.rows,), (Piece(view, (slice(c.start, c.stop),)),))
            for c, view in zip(self.cuts, self.bias_O.split(self.sizes), strict=True)
        ]

    def parts(self) -> list[Part]:
        """Return a part for each matrix that is a separate tensor in the checkpoint."""
        views = self.weight.stored.split(self.sizes)
        return [
            Part(
                (c.rows, self.columns),
                (Piece(view, (slice(c.start, c.stop),)),),
                weight=self.weight,
            )
            for c, view in zip(self.cuts, views, strict=True)
        ]

    def fused_part(self) -> Part:
        """Return the part for a checkpoint that stacks the matrices in one tensor."""
        pieces, offset = [], 0
        for c, view in zip(self.cuts, self.weight.stored.split(self.sizes), strict=True):
            pieces.append(Piece(view, (slice(offset + c.start, offset + c.stop),)))
            offset += c.rows
        return Part((offset, self.columns), tuple(pieces), weight=self.weight)


class RowLinear(nn.Module):
    """A matrix sharded by columns; one all-reduce adds the ranks' partial sums."""

    def __init__(self, part: str, rows: int, columns: Cut, mesh: Mesh, dtype: torch.dtype) -> None:
        super().__init__()
        self.mesh = mesh
        self.rows, self.columns = rows, columns
        self.weight = Weight(part, rows, columns.stop - columns.start, dtype=dtype)

    def forward(self, x_TI: Tensor) -> Tensor:
        return self.mesh.all_reduce(self.partial(x_TI))

    def add_norm(self, x_TI: Tensor, residual_TO: Tensor, norm: Norm) -> tuple[Tensor, Tensor]:
        """Return the next residual, which is the output plus this one, and its norm."""
        if self.mesh.size == 1 and self.weight.format is None and self.weight.lora is None:
            return norm.after(x_TI, self.weight.plain, residual_TO)
        return norm(self(x_TI), residual_TO)  # type: ignore[no-any-return]

    def partial(self, x_TI: Tensor) -> Tensor:
        """Return this rank's partial sum, for layers that add to it before the all-reduce."""
        return self.weight.product(x_TI)

    def pack(self) -> None:
        self.weight.pack()

    def part(self) -> Part:
        index = (slice(None), slice(self.columns.start, self.columns.stop))
        pieces = (Piece(self.weight.stored, index),)
        return Part((self.rows, self.columns.rows), pieces, weight=self.weight)


class GatedNames(NamedTuple):
    """The checkpoint's names of a gated MLP's three matrices, below the layer's prefix."""

    gate: str
    up: str
    down: str


class GatedMLP(nn.Module):
    """down(activation(gate(x)) * up(x)), sharded along the intermediate size."""

    routed: ClassVar[bool] = False

    def __init__(
        self,
        hidden: int,
        width: int,
        names: GatedNames,
        mesh: Mesh,
        dtype: torch.dtype,
        activation: Activation = silu,
        *,
        part: str = "mlp",
    ) -> None:
        super().__init__()
        self.activation = activation
        share = cut(mesh, width, "the intermediate size")
        self.names = names
        self.gate_up = ColumnLinear(part, hidden, (share, share), dtype)
        self.down = RowLinear(part, hidden, share, mesh, dtype)

    def forward(self, x_TH: Tensor) -> Tensor:
        return self.down.mesh.all_reduce(self.partial(x_TH))

    def add_norm(self, x_TH: Tensor, residual_TH: Tensor, norm: Norm) -> tuple[Tensor, Tensor]:
        """Return the next residual, which is the output plus this one, and its norm."""
        return norm(self(x_TH), residual_TH)  # type: ignore[no-any-return]

    def partial(self, x_TH: Tensor) -> Tensor:
        """Return this rank's partial sum."""
        gate_TI, up_TI = self.gate_up(x_TH).chunk(2, dim=-1)
        return self.down.partial(self.activation(gate_TI).mul_(up_TI))

    def pack(self) -> None:
        self.gate_up.pack()
        self.down.pack()

    def parts(self, prefix: str, _: Collection[str]) -> Parts:
        gate, up = self.gate_up.parts()
        return {
            f"{prefix}.{self.names.gate}": gate,
            f"{prefix}.{self.names.up}": up,
            f"{prefix}.{self.names.down}": self.down.part(),
        }


class VocabTable(nn.Module):
    """Rows of a vocabulary, sharded over the ranks: an embedding, a head, or both."""

    def __init__(self, part: str, vocab: int, hidden: int, mesh: Mesh, dtype: torch.dtype) -> None:
        super().__init__()
        self.mesh, self.hidden = mesh, hidden
        # Any vocabulary can be sharded; the slices need not have equal lengths.
        self.rows = Cut(vocab, *mesh.spread(vocab, "the vocabulary size"))
        self.weight = Weight(part, self.rows.stop - self.rows.start, hidden, dtype=dtype)

    @property
    def weight_VH(self) -> Tensor:
        return self.weight.plain

    def embed(self, ids_T: Tensor) -> Tensor:
        """Return the rows of the ids."""
        if self.mesh.size == 1:
            return self._rows(ids_T)
        local_T = ids_T - self.rows.start
        absent_T = (local_T < 0) | (local_T >= len(self.weight.stored))
        x_TH = self._rows(local_T.masked_fill(absent_T, 0))
        return self.mesh.all_reduce(x_TH.masked_fill_(absent_T.unsqueeze(-1), 0))

    def _rows(self, ids_T: Tensor) -> Tensor:
        if self.weight.format is None:
            return embedding(ids_T, self.weight_VH)
        return self.weight.rows(ids_T)

    def logits(self, hidden_RH: Tensor) -> Tensor:
        """Return this rank's slice of the logits."""
        return self.weight.product(hidden_RH)

    def pack(self) -> None:
        """Pack the rows for `logits`; `embed` then reads them only if they are in blocks."""
        self.weight.pack()

    def mix(self, weights_RV: Tensor) -> Tensor:
        """Return the weighted sum of all ranks' rows; `weights_RV` are this rank's weights."""
        weights_RV = weights_RV.to(self.weight.dtype)
        if self.weight.format is None:
            return self.mesh.all_reduce(weights_RV @ self.weight_VH)
        return self.mesh.all_reduce(sum_rows(weights_RV, self.weight.kept))

    def part(self) -> Part:
        pieces = (Piece(self.weight.stored, (slice(self.rows.start, self.rows.stop),)),)
        return Part((self.rows.rows, self.hidden), pieces, weight=self.weight)


class Angles(NamedTuple):
    """What the tokens of a forward are rotated by."""

    cos_T1R: Tensor
    sin_T1R: Tensor
    scale_T11: Tensor | None = None  # of queries


class Rotary(nn.Module):
    """The angles of every position; looked up once per forward and shared by the layers."""

    def __init__(self, rope: Rope, rotated: int) -> None:
        super().__init__()
        self.rope = rope
        # The models define angles and rotation in float32, whatever the dtype of their weights.
        table_P1R = empty(rope.positions, 1, rotated, dtype=torch.float32).data
        self.cos_P1R: Tensor
        self.sin_P1R: Tensor
        self.register_buffer("cos_P1R", table_P1R, persistent=False)
        self.register_buffer("sin_P1R", table_P1R.clone(), persistent=False)
        self.scale_P11: Tensor | None
        scale_P11 = empty(rope.positions, 1, 1, dtype=torch.float32).data
        grown = scale_P11 if rope.query_growth else None
        self.register_buffer("scale_P11", grown, persistent=False)

    def fill(self) -> None:
        """Compute the tables in place, after the model has been allocated."""
        cos_PR, sin_PR = rope_tables(self.rope, self.cos_P1R.shape[-1], self.cos_P1R.dtype)
        self.cos_P1R.copy_(cos_PR.unsqueeze(1))
        self.sin_P1R.copy_(sin_PR.unsqueeze(1))
        if self.scale_P11 is not None:
            self.scale_P11.copy_(self.rope.query_scales().view(-1, 1, 1))

    def forward(self, positions_T: Tensor) -> Angles:
        scale_P11 = self.scale_P11
        return Angles(
            self.cos_P1R.index_select(0, positions_T),
            self.sin_P1R.index_select(0, positions_T),
            None if scale_P11 is None else scale_P11.index_select(0, positions_T),
        )
