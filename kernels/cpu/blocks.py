"""Matrices in GGUF's blocks on a CPU: their layout in tiles, and products of integers with them.

Where the program cannot be compiled, torch widens the weights instead.

Letters: T packed tokens, I input columns, O output rows, G blocks of a row, N rows that are read.
"""

from typing import Final

import torch
from torch import Tensor

from diffray.kernels.cpu.program import program as compiled
from diffray.kernels.quantize import Quantized, numbers, pack_nibbles

_KINDS: Final = {"q8_0": 0, "q4_0": 1, "q4_1": 2}
_FOUR: Final = 4  # numbers that are multiplied together
_ROWS: Final = 1024  # a multiple of all lanes


def tiled(kept: Quantized) -> Quantized:
    """Return a matrix in the layout of `Product`, or as it is where that does not run."""
    program = compiled() if kept.values_EOI.is_cpu and kept.values_EOI.dim() == 2 else None
    rows, columns = kept.shape[-2:]
    if program is None or rows % program.lanes():
        return kept
    lanes, blocks = program.lanes(), columns // 32
    values = torch.empty((rows // lanes, blocks, kept.format.bits, lanes, _FOUR), dtype=torch.uint8)
    for first in range(0, rows, _ROWS):  # a part at a time, as this takes several times its memory
        found = numbers(kept[first : first + _ROWS]).view(torch.uint8)
        # Blocks of fours, and of each four one of every row.
        found = found.unflatten(0, (-1, lanes)).unflatten(-1, (-1, 8, _FOUR)).permute(0, 2, 3, 1, 4)
        if kept.format.bits == 4:
            found = found[:, :, 0::2] | (found[:, :, 1::2] << 4)
        else:
            found = found ^ program.shift()
        values[first // lanes : (first + _ROWS) // lanes] = found

    def in_tiles(each_OG: Tensor) -> Tensor:
        tiles: Tensor = each_OG.unflatten(0, (-1, lanes)).transpose(1, 2)
        return tiles.contiguous()

    minimum = None if kept.zero_EOG is None else in_tiles(kept.zero_EOG)
    return Quantized(kept.format, values, in_tiles(kept.scale_EOG), minimum)


def untiled(kept: Quantized) -> Quantized:
    """Return a tiled matrix in the usual layout."""
    found = Quantized.empty(kept.shape, kept.format, "cpu")
    for first in range(0, len(kept), _ROWS):
        part = slice(first, first + _ROWS)
        found[part].copy_(read_rows(kept, part))
    return found


def read_rows(kept: Quantized, index: Tensor | slice) -> Quantized:
    """Return rows of a tiled matrix in the usual layout."""
    program = compiled()
    assert program is not None, "a tiled matrix"
    row_N = torch.arange(kept.shape[0])[index] if isinstance(index, slice) else index
    tile_N, lane_N = row_N // program.lanes(), row_N % program.lanes()
    found = kept.values_EOI[tile_N, :, :, lane_N]  # [N, G, fours or pairs of them, 4]
    if kept.format.bits == 4:
        found = torch.stack([found & 15, found >> 4], dim=3).flatten(2, 3)
        values = pack_nibbles(found.flatten(1))
    else:
        values = (found.flatten(1) ^ program.shift()).view(torch.int8)
    minimum = None if kept.zero_EOG is None else kept.zero_EOG[tile_N, :, lane_N]
    return Quantized(kept.format, values, kept.scale_EOG[tile_N, :, lane_N], minimum)


class Product:
    """x @ weight.T for a tiled matrix; every 32 numbers of a row are rounded to bytes."""

    def __init__(self, kept: Quantized) -> None:
        program, minimum = compiled(), kept.zero_EOG
        assert program is not None and kept.is_tiled
        self.kept, self.run = kept, program.block_product
        self.rows, self.columns = kept.shape
        self.matrix = (
            kept.values_EOI.data_ptr(),
            kept.scale_EOG.data_ptr(),
            None if minimum is None else minimum.data_ptr(),
            self.rows,
            kept.scale_EOG.shape[1],
            _KINDS[kept.format.kind],
        )

    def __call__(self, x_TI: Tensor, bias_O: Tensor | None = None) -> Tensor:
        wide_TI = x_TI if x_TI.dtype == torch.float32 else x_TI.float()
        wide_TI = wide_TI.contiguous()
        count, columns = wide_TI.shape
        assert columns == self.columns, f"{columns} columns"  # the program does not look
        out_TO = torch.empty(count, self.rows)
        threads = torch.get_num_threads()
        if not self.run(wide_TI.data_ptr(), count, *self.matrix, out_TO.data_ptr(), threads):
            raise MemoryError(f"no memory to round {count} rows")
        if bias_O is not None:
            out_TO.add_(bias_O)
        return out_TO if x_TI.dtype == torch.float32 else out_TO.to(x_TI.dtype)
