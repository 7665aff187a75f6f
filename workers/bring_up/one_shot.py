"""Sums in one shot over GPUs of one machine: opened and compared once with the group's sums."""

from collections.abc import Callable
from dataclasses import replace
from typing import Final

import torch

from diffray.components.mesh import Mesh, OneShot, Sum, open_one_shot
from diffray.kernels.checksum import checksum
from diffray.kernels.kernel import TOLERANCE
from diffray.kernels.noise import spread
from diffray.kernels.numeric_errors import share_of_rows_beyond
from diffray.kernels.verify import one_line

Open = Callable[[Mesh, torch.dtype, int], Sum]

MOST_BYTES: Final = 512 << 10  # every rank reads all of it from every other
_ROW: Final = 1024  # numbers


@torch.inference_mode()
def use_one_shot(
    mesh: Mesh, dtype: torch.dtype, say: Callable[[str], None], opener: Open = open_one_shot
) -> Mesh:
    """Return a mesh that sums small tensors in one shot if all ranks can; all must call this."""
    if not mesh.on_one_machine():
        return mesh
    add_up, failure = None, ""
    if mesh.rank == 0:
        say("all-reduce: checking one-shot sums; --no-bring-up skips this")
    try:
        add_up = opener(mesh, dtype, MOST_BYTES)
    except Exception as error:  # whatever torch or the driver raises
        failure = one_line(error)
    if mesh.smallest("one-shot sums", int(add_up is not None)) and add_up is not None:
        failure = _wrong(mesh, add_up, dtype)
        if mesh.smallest("right sums", int(not failure)):
            return replace(mesh, one_shot=OneShot(add_up, dtype, MOST_BYTES))
    say(f"all-reduce: one-shot sums are off: {failure or 'another rank refuses them'}")
    return mesh


def _wrong(mesh: Mesh, add_up: Sum, dtype: torch.dtype) -> str:
    """Return how sums differ from the group's; empty if they do not."""
    wrong = ""
    for turn, size in enumerate((MOST_BYTES // 64, MOST_BYTES)):
        x = torch.empty(size // dtype.itemsize, dtype=dtype, device=mesh.device).view(-1, _ROW)
        spread(x, turn * mesh.size + mesh.rank, 1.0)
        expected, got = mesh.all_reduce(x.clone()), torch.full_like(x, torch.nan)
        try:
            got = add_up(x)
        except Exception as error:  # it may not take this dtype
            wrong = wrong or one_line(error)
        if not bool(mesh.all_equal(checksum(got.view(torch.int32)))):
            wrong = wrong or "the ranks' sums differ"
        if (off := share_of_rows_beyond(TOLERANCE[dtype], got, expected)) > 0:
            wrong = wrong or f"{off:.0%} of the rows are wrong"
    return wrong
