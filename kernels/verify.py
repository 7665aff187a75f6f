"""Compares a kernel's Triton program with its torch reference on the same arguments."""

import warnings
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Items
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from diffray.kernels.kernel import Kernel


def verified(
    kernel: Kernel,
    args: tuple[Any, ...],
    options: dict[str, Any],
    ran: Callable[[str], None] = lambda _why: None,
) -> tuple[Any, str]:
    """Return what the reference returns, and why the program must not run; empty if it may.

    `ran` is called between the two, with what the program raised. The tensors that a call stores to
    are left as the reference leaves them.
    """
    got, why = list[Tensor](), ""
    try:
        with _restored(kernel, args, options) as stored, _nan_filled_memory():
            got += tensors_of(kernel.program(*args, **options))
            got += [each.clone() for each in stored]
            if any(each.is_cuda for each in got):
                torch.cuda.synchronize()  # so that its errors are raised here
    except Exception as failure:  # whatever a kernel can raise
        why = one_line(failure)
    ran(why)
    out = kernel.reference(*args, **options)
    if why:
        return out, why
    expected = [*tensors_of(out), *kernel.written(*args, **options)]
    error, allowed = kernel.error(args, got, expected), kernel.allowed(*args, **options)
    if error <= allowed:  # NaN is not
        return out, ""
    return out, f"wrong: error {error:.1e}, at most {allowed:.1e} allowed"


def one_line(failure: Exception) -> str:
    """Return an exception as one short line."""
    lines = str(failure).strip().splitlines()
    return f"{type(failure).__name__}: {lines[0][:200]}" if lines else type(failure).__name__


@contextmanager
def _restored(
    kernel: Kernel, args: tuple[Any, ...], options: dict[str, Any]
) -> Iterator[Items[Tensor]]:
    """Yield the tensors that a call stores to, then restore them."""
    stored = kernel.written(*args, **options)
    before = [tensor.clone() for tensor in stored]
    try:
        yield stored
    finally:
        for tensor, old in zip(stored, before, strict=True):
            tensor.copy_(old)


def tensors_of(result: Any) -> list[Tensor]:
    """Return a kernel's outputs as a list, without those that are None."""
    if result is None or isinstance(result, Tensor):
        return [] if result is None else [result]
    return [tensor for part in result for tensor in tensors_of(part)]


@contextmanager
def _nan_filled_memory() -> Iterator[None]:
    """Fill new tensors with NaN; what a kernel leaves unwritten might hold an earlier result."""
    before = torch.get_deterministic_debug_mode()
    torch.set_deterministic_debug_mode("warn")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        torch.set_deterministic_debug_mode(before)
