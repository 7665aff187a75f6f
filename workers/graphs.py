"""Steps of fixed shapes, recorded at startup and replayed with other inputs.

On a GPU a recording is a CUDA graph: a few hundred launches become one. A recording belongs to a
bucket (a number of windows, each of at most a number of positions) and reads and writes tensors
that stay in place; their contents select canvases, pages and rows. Unused windows of a bucket are
padding: they show the model a dummy position and store into page 0.

The recording covers the model's forward and the choice of a token for each row of the head. It does
not cover decoders and canvases, because every mixture of decoders would need its own recording.
Requests that need more than the best token (filters, biases, guidance, rankings, credit) continue
from the hidden states.

Letters: T tokens of a bucket, W windows, P pages of a window, B windows of a group, Q queries of a
window, K keys, R rows of the head, H hidden size.
"""

from collections.abc import Callable, Iterable, Iterator
from collections.abc import Sequence as Items
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from tqdm.auto import tqdm

from diffray.components.backend import Record, peak_memory, send
from diffray.components.batch import (
    Batch,
    Window,
    begins_of,
    ends_of,
    own_places,
    seen_keys,
    slots_of,
)
from diffray.components.caches.vicinity import Vicinity
from diffray.components.kv_pool import KVPool
from diffray.components.model import Model
from diffray.components.model_spec import ModelSpec
from diffray.kernels.confidence import Confidence
from diffray.kernels.kernel import TOLERANCE
from diffray.kernels.numeric_errors import share_of_rows_beyond
from diffray.kernels.windows import Group, PagedWindows
from diffray.workers.engine_options import EngineOptions
from diffray.workers.slots import Slots

_FEWEST_ROWS = 32  # rows of the head; fewer cost as much
_OFF = 0.1  # share of rows that may differ where a library switches algorithms


class Bucket(NamedTuple):
    """The size of a recording: its number of windows, and the positions of each, at most."""

    windows: int
    length: int

    @property
    def tokens(self) -> int:
        return self.windows * self.length


def buckets_of(spec: ModelSpec, setup: EngineOptions) -> list[Bucket]:
    """Return the buckets that an engine records, the largest first."""
    block_length = setup.graph_block_length or spec.block_length
    near = 0 if spec.block_causal else Vicinity().neighbours
    return buckets_for(setup.max_num_seqs, block_length + spec.logit_shift, near)


def buckets_for(max_num_seqs: int, block_length: int, neighbours: int = 0) -> list[Bucket]:
    """Return buckets for one and for two blocks of every sequence, the largest first.

    A step usually runs one block, and its neighbours under `vicinity`; under `exact` a block's
    first step runs the previous block too.
    """
    counts = {2**power for power in range(max_num_seqs.bit_length())} | {max_num_seqs}
    lengths = {block_length, block_length + neighbours, 2 * block_length}
    found = [Bucket(windows, length) for windows in counts for length in lengths]
    return sorted(found, key=lambda bucket: (bucket.tokens, bucket.length), reverse=True)


@dataclass(frozen=True, slots=True)
class StaticWindows:
    """A bucket's windows, each at a multiple of the same length."""

    paged: PagedWindows

    @property
    def groups(self) -> tuple[Group, ...]:
        """Return one group of all windows with the maximum number of keys, most of them masked.

        Computed on the device, so that it is part of the recording.
        """
        return self._group(None)

    def near(self, reach: int) -> tuple[Group, ...]:
        return self._group(reach)

    @property
    def open_T(self) -> Tensor:
        return (self._at_BQ >= self.paged.open_W.unsqueeze(1)).flatten()

    @property
    def _at_BQ(self) -> Tensor:
        start_W, length = self.paged.start_W, self.paged.max_queries
        return start_W.unsqueeze(1) + torch.arange(length, device=start_W.device)

    def _group(self, reach: int | None) -> tuple[Group, ...]:
        _, start_W, kv_stop_W, block_W, _, stop_W, pages_WP, size, length = self.paged
        keys_BK = slots_of(pages_WP, pages_WP.shape[1] * size, size)
        at_BQ = self._at_BQ
        ends_BQ = ends_of(at_BQ, block_W, kv_stop_W)
        begin_BQ = None if reach is None else begins_of(at_BQ, block_W, start_W, reach)
        keys_K = torch.arange(keys_BK.shape[1], device=pages_WP.device)
        seen_BQK = seen_keys(keys_K, begin_BQ, ends_BQ)
        places = own_places(at_BQ, keys_BK.shape[1]).view(at_BQ.shape)
        places = places.where(at_BQ < stop_W.unsqueeze(1), keys_BK.numel()).flatten()
        return (Group(0, len(stop_W), length, keys_BK, seen_BQK, places),)


class Recorded:
    """One bucket's tensors and the recordings that read them."""

    def __init__(
        self, bucket: Bucket, model: Model, kv: KVPool, slots: Slots, record: Record
    ) -> None:
        self.bucket = bucket
        self._model, self._kv, self._slots = model, kv, slots
        device = slots.device
        # Of each token: its position, the K/V slot that it stores to, its cell on a canvas.
        self._places_3T = torch.zeros(3, bucket.tokens, dtype=torch.long, device=device)
        self._read_R = torch.zeros(bucket.tokens, dtype=torch.long, device=device)
        # Rounded up, so that each row starts at an address that Triton is compiled for.
        facts_5W = torch.zeros(5, -(-bucket.windows // 4) * 4, dtype=torch.int32, device=device)
        self._facts_5W = facts_5W[:, : bucket.windows]
        pages = bucket.windows, kv.pages_for(slots.length)
        self._pages_WP = torch.zeros(pages, dtype=torch.int32, device=device)
        first_W = torch.arange(bucket.windows + 1, dtype=torch.int32, device=device) * bucket.length
        start_W, kv_stop_W, block_W, open_W, stop_W = self._facts_5W
        found = first_W, start_W, kv_stop_W, block_W, open_W, stop_W, self._pages_WP
        paged = PagedWindows(*found, kv.page_size, bucket.length)
        positions_T, slots_T, cells_T = self._places_3T
        self.batch = Batch(positions_T, slots_T, cells_T, StaticWindows(paged))
        self.fill(())
        self._forward = record(self._run_forward)
        self._hidden_TH: Tensor = self._forward()
        self._choose = {
            rows: record(partial(self._run_choice, rows)) for rows in halves(bucket.tokens)
        }

    def fill(self, windows: Items[Window]) -> None:
        """Point the recordings at these windows."""
        count, length = self.bucket
        # Padding is a window of one position whose only key was stored by padding.
        padding = [(0, 0, 1, 0, 0, 0)] * (count - len(windows))
        start_W, stop_W, kv_stop_W, block_W, open_W, canvas_W = torch.tensor(
            [*(window.facts for window in windows), *padding]
        ).unbind(1)
        pages_WP = torch.zeros(self._pages_WP.shape, dtype=torch.long)
        if windows:
            own_WP = pad_sequence([window.pages_P for window in windows], batch_first=True)
            pages_WP[: own_WP.shape[0], : own_WP.shape[1]] = own_WP
        position_WT = start_W.unsqueeze(1) + torch.arange(length)
        inside_WT = position_WT < stop_W.unsqueeze(1)
        position_WT *= inside_WT
        size = self._kv.page_size
        slot_WT = pages_WP.gather(1, position_WT // size) * size + position_WT % size
        cell_WT = (canvas_W.unsqueeze(1) + position_WT).where(inside_WT, self._slots.trash)
        places_3WT = torch.stack([position_WT, slot_WT * inside_WT, cell_WT])
        facts_5W = torch.stack([start_W, kv_stop_W, block_W, open_W, stop_W])
        # One copy to the device for all of them.
        parts = places_3WT.flatten(), facts_5W.flatten(), pages_WP.flatten()
        moved = send(torch.cat(parts), self._slots.device).split([len(part) for part in parts])
        places = self._places_3T, self._facts_5W, self._pages_WP
        for place, part in zip(places, moved, strict=True):
            place.copy_(part.view(place.shape))

    def read(self, tokens_R: Tensor) -> None:
        """Set the rows for which `choose` selects tokens."""
        self._read_R.zero_()
        self._read_R[: len(tokens_R)] = tokens_R

    def forward(self) -> Tensor:
        """Run the model; return the hidden states of all tokens."""
        self._hidden_TH = self._forward()
        return self._hidden_TH

    def choose(self, count: int) -> Confidence:
        """Return the greedy choice for the first `count` rows set by `read`."""
        capacity = min(rows for rows in self._choose if rows >= count)
        found = self._choose[capacity]()
        return Confidence(*(part[:count] for part in found))

    def wrong(self) -> str:
        """Return how replays differ from launched steps; empty if they do not."""

        def outputs(
            forward: Callable[[], Tensor], choose: Callable[[], Confidence]
        ) -> list[Tensor]:
            self._hidden_TH = forward()
            _, *found = choose()  # not the ids, which may differ in near ties
            return [self._hidden_TH, *found[:4]]

        def copied(tensors: list[Tensor]) -> list[Tensor]:
            return [tensor.nan_to_num() for tensor in tensors]  # padding may overflow float16

        rows = self.bucket.tokens
        launched = outputs(self._run_forward, partial(self._run_choice, rows))
        expected = copied(launched)
        replay = partial(outputs, self._forward, self._choose[rows])
        for tensor in replay():
            tensor.fill_(torch.nan)  # what an earlier replay computed must not remain
        first, second = copied(replay()), copied(replay())  # all ranks replay as often
        allowed = TOLERANCE[expected[0].dtype]
        off = max(map(partial(share_of_rows_beyond, allowed), first, expected))
        if off > _OFF or not all(map(torch.equal, second, first)):
            windows, length = self.bucket
            return f"replays of {windows} x {length} positions differ from launched steps"
        return ""

    def _run_forward(self) -> Tensor:
        ids_T = self._slots.ids_SN.view(-1).index_select(0, self.batch.cells_T)
        return self._model.forward(self._model.embed(ids_T), self.batch, self._kv)

    def _run_choice(self, rows: int) -> Confidence:
        hidden_RH = self._hidden_TH.index_select(0, self._read_R[:rows])
        return self._model.confidence(hidden_RH, self._slots.mask_token_id, None)


class Graphs:
    """The recordings of all buckets."""

    def __init__(
        self,
        model: Model,
        kv: KVPool,
        slots: Slots,
        buckets: Iterable[Bucket],
        record: Record,
        *,
        progress: bool = False,
    ) -> None:
        self._buckets, self._progress = list(buckets), progress
        self._make = partial(Recorded, model=model, kv=kv, slots=slots, record=record)
        self.record()

    @torch.inference_mode()
    def record(self) -> None:
        """Record all buckets, at startup and after `forget`."""
        # The largest comes first, so that the others reuse its memory.
        bar = tqdm(self._buckets, desc="graphs", unit="", disable=None if self._progress else True)
        self._recorded = [self._make(bucket) for bucket in bar]

    @torch.inference_mode()
    def wrong(self) -> str:
        """Return how replays of the smallest bucket differ from launched steps, if they do."""
        return self._recorded[-1].wrong()

    def forget(self) -> None:
        """Free the recordings; until `record` is called again, every step is launched."""
        self._recorded = []

    def fit(self, windows: int, length: int) -> Recorded | None:
        """Return the smallest bucket that fits this number of windows of this length."""
        fitting = (
            recorded
            for recorded in self._recorded
            if recorded.bucket.windows >= windows and recorded.bucket.length >= length
        )
        return min(fitting, key=lambda recorded: recorded.bucket.tokens, default=None)


@torch.inference_mode()
def memory_for(bucket: Bucket, model: Model, kv: KVPool, slots: Slots) -> int:
    """Estimate the bytes that the recordings of a bucket and of all smaller ones take.

    The bucket is run once without recording, on padding only: a pool of one page suffices.
    """

    def run() -> None:
        Recorded(bucket, model, kv, slots, run_again).choose(bucket.tokens)

    return peak_memory(slots.device, run)


def run_again(run: Callable[[], Any]) -> Callable[[], Any]:
    """Stand in for a recorder: record nothing and run the work again each time."""
    return run


def halves(rows: int) -> Iterator[int]:
    """Yield row counts for the head, each half the previous: only masked positions need it."""
    while True:
        yield rows
        if rows <= _FEWEST_ROWS:
            return
        rows = -(-rows // 2)
