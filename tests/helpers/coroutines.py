"""Runs tests that are coroutines, each in an event loop of its own (a pytest plugin); `until`."""

import asyncio
import inspect
from collections.abc import Callable

import pytest


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    named = inspect.signature(pyfuncitem.obj).parameters
    asyncio.run(pyfuncitem.obj(**{name: pyfuncitem.funcargs[name] for name in named}))
    return True


async def until(enough: Callable[[], object]) -> None:
    """Let the tasks go on until something is so."""
    async with asyncio.timeout(60):
        while not enough():
            await asyncio.sleep(0.001)
