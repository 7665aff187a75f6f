"""Finds the fastest tiles for a model's shapes, before graphs are recorded.

Each recorded shape runs once while the kernels' tuner tries tiles, with many different token ids
and contexts of full length: padding would reach few experts and see one key.
"""

from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch
from tqdm.auto import tqdm

from diffray.components.batch import Window
from diffray.components.kv_pool import KVPool
from diffray.components.model import Model
from diffray.workers.graphs import Bucket, Recorded, halves, run_again
from diffray.workers.slots import Slots

if TYPE_CHECKING:
    from diffray.kernels.triton.tuning import Seconds

_STRIDE = 7919  # so that neighbours get distant ids


@torch.inference_mode()
def tune(
    model: Model,
    kv: KVPool,
    slots: Slots,
    buckets: Iterable[Bucket],
    longest: int,
    *,
    seconds: "Seconds | None" = None,
    progress: bool = False,
) -> None:
    """Try tiles for steps of these buckets, and for one window of the longest length.

    It overwrites canvases and K/V memory, which are not in use yet.
    """
    tuner = kv.kernels.tuner
    assert tuner is not None, "these kernels have no tiles"
    whole = Bucket(1, min(longest, slots.length))
    cells = torch.arange(slots.ids_SN.numel(), device=slots.device)
    slots.ids_SN.copy_((cells * _STRIDE % model.spec.vocab_size).view_as(slots.ids_SN))
    bar = tqdm([whole, *buckets], desc="tiles", unit="", disable=None if progress else True)
    for bucket in bar:
        steps = Recorded(bucket, model, kv, slots, run_again)
        steps.fill([_window(number, bucket, model, kv, slots) for number in range(bucket.windows)])
        steps.read(torch.arange(bucket.tokens, device=slots.device))
        with tuner.measuring(seconds):
            steps.forward()
            if bucket is not whole:  # only the rows of one block are read
                for rows in halves(bucket.tokens):
                    steps.choose(rows)
    slots.ids_SN.zero_()


def _window(number: int, bucket: Bucket, model: Model, kv: KVPool, slots: Slots) -> Window:
    """Return a window of the last positions of a canvas, which sees all of it."""
    length = min(bucket.length, slots.length)
    pages = kv.pages_for(slots.length)
    own_P = torch.arange(number * pages, (number + 1) * pages) % (kv.num_pages - 1) + 1
    block = length if model.spec.block_causal else 0
    start = slots.length - length
    return Window(start, slots.length, slots.length, block, own_P, number * slots.length)
