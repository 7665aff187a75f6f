"""The C programs for forwards of few rows on a CPU in float32, in place of calls of torch.

Letters: T packed tokens, H hidden size, N heads of any kind, D head size, R an adapter's rank, I
input columns, O output rows, A tokens of an adapter.
"""

from collections.abc import Iterable
from ctypes import CDLL
from functools import cache, lru_cache
from typing import Final, NamedTuple

import torch
from torch import Tensor

from diffray.kernels import attention, confidence, norm
from diffray.kernels.attention import KVLayer, QKRotary
from diffray.kernels.confidence import Extremes
from diffray.kernels.cpu.program import program
from diffray.kernels.linear import linear
from diffray.kernels.windows import Group, Windows

FEW: Final = 8  # queries of a window that attend here; for more, torch is faster
MOST_KEYS: Final = 1024  # of a causal window that attends here whatever its queries
_FEW_PRODUCTS: Final = 1 << 19  # multiplications of an adapter; for more, torch is faster
_FEW_SCORES: Final = 1 << 20  # multiplications of attention that one thread does sooner than two
_MOST_VECTORS: Final = 16  # of a head
_LITTLE: Final = 1 << 16  # numbers that one thread passes through sooner than two begin


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Do the same as torch's kernel."""
    if weight.dim() > 1 or not _fits(x, x.shape[-1]) or weight.dtype != x.dtype:
        return norm.rms_norm(x, weight, eps)
    return _norm(x, None, weight, eps)[1]


def add_norm(
    x_TH: Tensor, residual_TH: Tensor, weight_H: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """Do the same as torch's kernel."""
    same = residual_TH.is_contiguous() and residual_TH.dtype == weight_H.dtype == x_TH.dtype
    if not same or not _fits(x_TH, x_TH.shape[-1]):
        return norm.add_norm(x_TH, residual_TH, weight_H, eps)
    return _norm(x_TH, residual_TH, weight_H, eps)


def linear_add_norm(
    x_TI: Tensor, weight_OI: Tensor, residual_TO: Tensor, norm_O: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """Do the same as torch's kernel."""
    return add_norm(linear(x_TI, weight_OI), residual_TO, norm_O, eps)


def extremes(logits_RV: Tensor, forbidden: int | None) -> Extremes:
    """Do the same as torch's kernel, but that what is not a number is never the best."""
    if not _fits(logits_RV, 0) or logits_RV.numel() == 0:
        return confidence.extremes(logits_RV, forbidden)
    library, (rows, size) = program(), logits_RV.shape
    assert library is not None
    found_2R, index_R = torch.empty(2, rows), torch.empty(rows, dtype=torch.long)
    given = logits_RV.data_ptr(), rows, size, -1 if forbidden is None else forbidden
    threads = min(_threads(logits_RV), rows)
    library.extremes(*given, found_2R.data_ptr(), index_R.data_ptr(), threads)
    return Extremes(found_2R[0], found_2R[1], index_R)


def attend(
    heads_TND: Tensor, rotary: QKRotary, kv: KVLayer, slots_T: Tensor, windows: Windows
) -> Tensor:
    """Do the same as torch's kernel; the heads are rotated in place.

    The bits of a query in a window of few, or in a causal one of not too many keys, do not depend
    on how many there are: they are those of one token at a time, and with any prefix in the cache.
    """
    count, _, size = heads_TND.shape
    rotated, keys = rotary.cos_T1R.shape[-1], kv.keys_SGD.shape[1]
    if not _fits(heads_TND, size) or size > _MOST_VECTORS * _lanes():
        return attention.attend(heads_TND, rotary, kv, slots_T, windows)
    library, queries = program(), heads_TND.shape[1] - 2 * keys
    assert library is not None
    norms = None if rotary.norm_ND is None else rotary.norm_ND.data_ptr()
    heads, pools = heads_TND.data_ptr(), (kv.keys_SGD.data_ptr(), kv.values_SGD.data_ptr())
    library.rotate_and_store(
        heads, norms, rotary.eps, rotary.cos_T1R.data_ptr(), rotary.sin_T1R.data_ptr(),
        slots_T.data_ptr(), *pools, count, queries, keys, size, rotated, _threads(heads_TND),
    )  # fmt: skip
    out_THD = torch.empty(count, queries, size)
    plan = _plan(windows)
    if plan.others:
        q_THD, k_TGD, v_TGD = heads_TND.split([queries, keys, keys], dim=1)
        attention.window_attention(q_THD, k_TGD, v_TGD, *kv, plan.others, out_THD=out_THD)
        if not plan.any_here:
            return out_THD
    threads = 1 if count * queries * size * plan.keys <= _FEW_SCORES else torch.get_num_threads()
    stride, scale = heads_TND.shape[1] * size, size**-0.5
    done = library.attend_windows(
        heads, stride, *pools, *plan.given, queries, keys, size, scale, out_THD.data_ptr(), threads
    )
    if not done:
        raise MemoryError(f"no memory for the scores of {plan.keys} keys")
    return out_THD


class _Plan(NamedTuple):
    """Which windows of a forward attend here; all layers share it."""

    kept: tuple[Tensor, ...]  # whose memory is given to the program
    given: tuple[int, ...]
    others: tuple[Group, ...]  # of which some window does not
    any_here: bool
    keys: int  # at most so many in a window


@lru_cache(maxsize=1)
def _plan(windows: Windows) -> _Plan:
    paged = windows.paged
    here_W, others = paged.first_W.diff() <= FEW, list[Group]()
    if paged.max_queries > FEW:
        here_W |= (paged.block_W == 1) & (paged.kv_stop_W <= MOST_KEYS)
        start = 0
        for group in windows.groups:
            if not here_W[start : start + group.windows].all():
                others.append(group)
            start += group.windows
    places, pages = [each.data_ptr() for each in paged[:4]], paged.pages_WP
    table = pages.data_ptr(), pages.shape[1], paged.page_size, here_W.data_ptr(), len(here_W)
    keys = pages.shape[1] * paged.page_size
    kept = *paged[:4], pages, here_W
    return _Plan(kept, (*places, *table), tuple(others), bool(here_W.any()), keys)


class LowRankSum:
    """y += x @ down.T @ up for some tokens and all parts, whose outputs begin at columns of y."""

    def __init__(self, parts: Iterable[tuple[Tensor, Tensor, int]]) -> None:
        self._kept, table = list[Tensor](), list[int]()
        self._products = 0  # for a row
        self.inputs = 0  # 0 where the program does not run
        for down_RI, up_RO, start in parts:
            if not (_fits(down_RI, down_RI.shape[1]) and _fits(up_RO, up_RO.shape[1])):
                return
            tiles = up_RO.unflatten(1, (-1, _lanes())).transpose(0, 1)
            wide = torch.cat([down_RI.flatten(), tiles.flatten()])
            narrow = wide.bfloat16()
            # Exact numbers of bfloat16 are read in it: half as much memory.
            exact = torch.equal(narrow.float(), wide)
            self._kept.append(narrow if exact else wide)
            table += [self._kept[-1].data_ptr(), int(exact), *up_RO.shape, start]
            self._products += wide.numel()
        self.inputs = down_RI.shape[1]
        self._table = torch.tensor(table)
        self._parts = self._table.data_ptr(), len(self._kept)

    def add(self, y_TO: Tensor, x_TI: Tensor, tokens_A: Tensor) -> bool:
        """Return False where it cannot."""
        rows = tokens_A.shape[0]
        few = rows * self._products <= _FEW_PRODUCTS
        if not self.inputs or not few or y_TO.dtype != torch.float32:
            return False
        if x_TI.dtype != torch.float32 or not (x_TI.is_contiguous() and y_TO.is_contiguous()):
            return False
        library = program()
        assert library is not None and x_TI.shape == (y_TO.shape[0], self.inputs)
        what = x_TI.data_ptr(), tokens_A.data_ptr(), rows, self.inputs, *self._parts
        library.add_low_rank(*what, y_TO.data_ptr(), y_TO.shape[1])
        return True


def _norm(x: Tensor, residual: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Return the sum, which is `x` without a residual, and its norm."""
    library, out = program(), torch.empty_like(x)
    assert library is not None
    total = x if residual is None else torch.empty_like(x)
    added = None if residual is None else residual.data_ptr()
    where = total.data_ptr(), out.data_ptr(), x.numel() // max(x.shape[-1], 1), x.shape[-1]
    library.rms_norm(x.data_ptr(), added, weight.data_ptr(), eps, *where, _threads(x))
    return total, out


def _fits(x: Tensor, size: int) -> bool:
    """Whether the programs take the tensor: its rows are whole vectors of float32 on the CPU."""
    if x.dtype != torch.float32 or not (x.is_cpu and x.is_contiguous()):
        return False  # before anything is compiled
    lanes = _lanes()
    return lanes > 0 and size % lanes == 0


def _lanes() -> int:
    """How many numbers a vector has; 0 where there is no program."""
    library = program()
    return 0 if library is None else _lanes_of(library)


@cache
def _lanes_of(library: CDLL) -> int:
    return int(library.lanes_of_floats())


def _threads(x: Tensor) -> int:
    return 1 if x.numel() <= _LITTLE else torch.get_num_threads()
