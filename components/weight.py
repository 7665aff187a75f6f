"""A matrix of a layer, or one for each expert, as it is kept: in the model's dtype or quantized.

Letters: T packed tokens, E experts, O output rows, I input columns, G scales of a row.
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn

from diffray.components.lora import LoRA
from diffray.components.low_rank import LowRank
from diffray.kernels.cpu import blocks
from diffray.kernels.cpu.blocks import Product
from diffray.kernels.formats import Format
from diffray.kernels.linear import linear, pack, unpack
from diffray.kernels.quantize import Quantized, dequantize, quantize
from diffray.kernels.quantized import kept_linear, pack_bytes, quantized_linear

Multiply = Callable[[Tensor, Quantized, Tensor | None], Tensor]


def empty(*shape: int, dtype: torch.dtype) -> nn.Parameter:
    """Return a parameter without storage; the whole model is allocated later."""
    return nn.Parameter(torch.empty(shape, dtype=dtype, device="meta"), requires_grad=False)


class Weight(nn.Module):
    """A matrix, or one for each expert; it may become quantized before or after it is loaded."""

    def __init__(self, part: str, *shape: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.part = part  # of the model, as the option `quantization` names it
        self.dtype = dtype  # of the model, whatever the matrix is kept in
        self.format: Format | None = None
        self.dense: nn.Parameter | None = empty(*shape, dtype=dtype)
        self.values_EOI: nn.Parameter | None = None
        self.scale_EOG: nn.Parameter | None = None
        self.zero_EOG: nn.Parameter | None = None
        self.lora: LowRank | None = None  # what adapters add to its product
        self._multiply: Multiply = quantized_linear
        self._product: Product | None = None  # of a matrix in tiles

    @property
    def plain(self) -> nn.Parameter:
        """The matrix in the model's dtype; it must not be quantized."""
        assert self.dense is not None
        return self.dense

    @property
    def kept(self) -> Quantized:
        """The quantized matrix."""
        assert self.format is not None and self.values_EOI is not None
        assert self.scale_EOG is not None
        return Quantized(self.format, self.values_EOI, self.scale_EOG, self.zero_EOG)

    @property
    def stored(self) -> Tensor | Quantized:
        """What a checkpoint's tensors are copied into."""
        return self.plain if self.format is None else self.kept

    @property
    def count(self) -> int:
        """How many weights there are, whatever memory they take."""
        return math.prod(self.stored.shape)

    def product(self, x_TI: Tensor, bias_O: Tensor | None = None) -> Tensor:
        """Return x @ weight.T + bias."""
        if self._product is not None:
            y_TO = self._product(x_TI, bias_O)
        elif self.format is None:
            y_TO = linear(x_TI, self.plain, bias_O)
        else:
            y_TO = self._multiply(x_TI, self.kept, bias_O)
        return y_TO if self.lora is None else self.lora.add(y_TO, x_TI)

    def adapted_product(self, x_PI: Tensor, expert: int, lora: LoRA) -> Tensor:
        """Return the product of an expert's matrix with rows of one adapter."""
        y_PO = kept_linear(x_PI, self.stored[expert])
        if self.lora is not None:
            self.lora.add_to_expert(y_PO, x_PI, lora, expert)
        return y_PO

    def quantize(self, form: Format, multiply: Multiply) -> None:
        """Keep the matrix in this format; without storage, only set up its tensors.

        `multiply` is for formats in bytes; the others have only one implementation.
        """
        dense = self.plain
        if form.in_bytes:
            self._multiply = multiply
        kept = Quantized.empty(dense.shape, form, dense.device)
        if not dense.is_meta:
            # One expert at a time: all of them in float32 would take several times the final size.
            for number in range(len(dense) if dense.dim() == 3 else 0):
                kept[number].copy_(quantize(dense[number], form))
            if dense.dim() == 2:
                kept.copy_(quantize(dense, form))
        self.dense, self.format = None, form
        self._keep(kept)

    def pack(self) -> None:
        """Lay a loaded matrix out as its product reads it fastest; else only `rows` can read it."""
        if self.format is None:
            self.dense = nn.Parameter(pack(self.plain), requires_grad=False)
        elif self.dtype == torch.float64:  # sums would become float32
            return
        elif self.format.kind == "w8a8":
            packed = pack_bytes(self.kept.values_EOI)
            self.values_EOI = nn.Parameter(packed, requires_grad=False)
        elif self.format.in_blocks:
            self._keep(blocks.tiled(self.kept))
            self._product = blocks.Product(self.kept) if self.kept.is_tiled else None

    def unpack(self) -> bool:
        """Restore the usual layout; return whether it was packed."""
        if self.format is not None and self.kept.is_tiled:
            self._keep(blocks.untiled(self.kept))
            self._product = None
            return True
        name = "dense" if self.format is None else "values_EOI"
        packed = getattr(self, name)
        if not packed.is_mkldnn:
            return False
        setattr(self, name, nn.Parameter(unpack(packed), requires_grad=False))
        return True

    def rows(self, ids_T: Tensor) -> Tensor:
        """Return some rows of a quantized matrix in the model's dtype."""
        kept = self.kept
        found = blocks.read_rows(kept, ids_T) if kept.is_tiled else kept[ids_T]
        return dequantize(found, self.dtype)

    def _keep(self, kept: Quantized) -> None:
        self.values_EOI = nn.Parameter(kept.values_EOI, requires_grad=False)
        self.scale_EOG = nn.Parameter(kept.scale_EOG, requires_grad=False)
        if kept.zero_EOG is not None:
            self.zero_EOG = nn.Parameter(kept.zero_EOG, requires_grad=False)
