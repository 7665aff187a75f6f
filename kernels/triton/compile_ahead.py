"""Compiles kernels in threads before they are first launched."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

from triton import AsyncCompileMode
from triton.runtime.jit import JITFunction


@contextmanager
def compiled_ahead(threads: int) -> Iterator[None]:
    """Compile kernels that are launched within the block instead of running them; wait at its end.

    A kernel that does not compile raises its error at its first real launch.
    """
    launch = JITFunction.run

    def only_compile(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        return launch(self, *args, grid=grid, warmup=True, **options)

    with ThreadPoolExecutor(threads) as pool, AsyncCompileMode(pool, ignore_errors=True):
        JITFunction.run = only_compile
        try:
            yield
        finally:
            JITFunction.run = launch
