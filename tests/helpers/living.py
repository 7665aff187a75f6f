"""How many objects of a class are alive: what has ended must not stay behind."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


def living(*kinds: type) -> int:
    """Count the objects of these classes, but not those that were there before `only_new`."""
    gc.collect()
    return sum(type(each) in kinds for each in gc.get_objects())


@contextmanager
def only_new() -> Iterator[None]:
    """Let `living` look through what is made from now on, which is quick."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
