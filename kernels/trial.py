"""Tries a variant of a kernel: compares it with the torch reference, then times it.

It is timed twice: launched, and replayed from a recording. Replays are compared as well.
"""

import math
import statistics
import time
import warnings
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Items
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from typing import Any, Final, Literal, NamedTuple, get_args

import torch
from torch import Tensor

from diffray.kernels.variants import TORCH_VARIANT, Choices, Kernel, Run, Shape, Variant

# The largest error of a variant, by the dtype that it computes in: twice the error of torch's
# experts, the least exact kernel, against exact sums of 2,048 numbers.
TOLERANCE: Final = {torch.float32: 2e-4, torch.float16: 6e-3, torch.bfloat16: 5e-2}

_FLUSH_BYTES = 256 << 20  # several times the largest L2 cache
_TIMED_S, _FEWEST, _MOST = 0.02, 5, 30  # as many runs as fit the seconds, within these bounds

# Which variants to use: the fastest alone, the fastest with what they may save in a step, or the
# defaults. Whole steps are tried with each of these selections, in this order.
Selection = Literal["fastest", "early", "defaults"]
SELECTIONS: Final[tuple[Selection, ...]] = get_args(Selection)

Seconds = Callable[[Run], float]
Record = Callable[[Run], Run]


class Call(NamedTuple):
    """A call of a kernel with its inputs."""

    kernel: Kernel
    args: tuple[Any, ...]
    options: dict[str, Any]

    @property
    def shape(self) -> Shape:
        return self.kernel.shape(*self.args, **self.options)

    @property
    def variants(self) -> list[Variant]:
        return self.kernel.variants(*self.args, **self.options)

    def tolerance_of(self, variant: Variant) -> float:
        """Return the largest error that the variant may have."""
        dtype = self.kernel.precision(*self.args, **self.options)
        return TOLERANCE[dtype] * self.kernel.tolerance * variant.tolerance


@dataclass(frozen=True, slots=True)
class Outcome:
    """The outcome of trying a variant on one shape."""

    kernel: str
    shape: Shape
    variant: str
    refused: str = ""  # why it must not run; empty if it may
    error: float | None = None  # None: it did not run, or the error is infinite
    launched_s: float | None = None
    replayed_s: float | None = None  # None: it cannot be recorded, or there are no recordings
    default: bool = False  # whether it runs if nothing was tried
    early_s: float = 0.0  # what it may save in a step beyond its own time

    @property
    def spoiled(self) -> bool:
        """Whether a failed recording may have left the process without a usable allocator."""
        return bool(self.refused) and self.launched_s is not None

    @property
    def seconds(self) -> float | None:
        return self.launched_s if self.replayed_s is None else self.replayed_s


def choices_of(outcomes: Items[Outcome], selection: Selection = "fastest") -> Choices:
    """Return the selected variant of each shape, never one that was refused anywhere.

    Variants that can be recorded come first; one that cannot would rule out graphs.
    """
    refused = {(each.kernel, each.variant) for each in outcomes if each.refused}
    right = [each for each in outcomes if (each.kernel, each.variant) not in refused]
    if selection == "defaults":
        right = [each for each in right if each.default or each.variant == TORCH_VARIANT]
    best: dict[tuple[str, Shape], Outcome] = {}
    for each in sorted(right, key=partial(_rank, early=selection == "early")):
        best.setdefault((each.kernel, each.shape), each)
    return Choices(
        {place: each.variant for place, each in best.items()},
        frozenset((each.kernel, each.variant) for each in right),
        frozenset(each.kernel for each in outcomes),
    )


def _rank(outcome: Outcome, *, early: bool) -> tuple[bool, float]:
    assert outcome.seconds is not None, "variants that were not refused are timed"
    return outcome.replayed_s is None, outcome.seconds - outcome.early_s * early


def attempt(
    calls: list[Call], variant: Variant, seconds: Seconds, record: Record | None
) -> Outcome:
    """Compare a variant with the reference on calls of one shape, then time it on the first."""
    first = calls[0]
    outcome = Outcome(first.kernel.name, first.shape, variant.name, early_s=variant.early_s)
    allowed = first.tolerance_of(variant)
    try:
        error = max(_compare(call, variant) for call in calls)
        outcome = replace(outcome, error=error if math.isfinite(error) else None)
        if not error <= allowed:
            return replace(outcome, refused=_wrong(error, allowed))
        run = partial(variant.run, *first.args, **first.options)
        with _restored(first):
            outcome = replace(outcome, launched_s=seconds(run))
    except Exception as failure:  # whatever a kernel can raise
        return replace(outcome, refused=one_line(failure))
    if record is None or not _can_be_recorded(first, variant):
        return outcome
    try:
        with _restored(first):
            replay = record(run)
        error = _compare(first, Variant(variant.name, partial(_replay_afresh, first, replay)))
        if not error <= allowed:
            return replace(outcome, refused=f"{_wrong(error, allowed)}, when replayed")
        with _restored(first):
            return replace(outcome, replayed_s=seconds(replay))
    except Exception as failure:
        return replace(outcome, refused=f"when recorded: {one_line(failure)}")


def _can_be_recorded(call: Call, variant: Variant) -> bool:
    """Whether to try a recording; if one fails, the process should not go on."""
    return variant.name != TORCH_VARIANT or call.kernel.recordable(*call.args, **call.options)


def one_line(failure: Exception) -> str:
    """Return an exception as one short line."""
    lines = str(failure).strip().splitlines()
    return f"{type(failure).__name__}: {lines[0][:200]}" if lines else type(failure).__name__


def _wrong(error: float, allowed: float) -> str:
    return f"wrong: error {error:.1e}, at most {allowed:.1e} allowed"


def _compare(call: Call, variant: Variant) -> float:
    """Return the variant's error; the tensors that a call stores to are restored."""
    kernel, args, options = call

    def outputs(run: Run) -> list[Tensor]:
        with _restored(call) as stored:
            return tensors_of(run(*args, **options)) + [tensor.clone() for tensor in stored]

    expected = outputs(kernel.reference)
    with _nan_filled_memory():
        got = outputs(variant.run)
    return kernel.error(args, got, expected)


@contextmanager
def _restored(call: Call) -> Iterator[Items[Tensor]]:
    """Yield the tensors that a call stores to, then restore them."""
    stored = call.kernel.written(*call.args, **call.options)
    before = [tensor.clone() for tensor in stored]
    yield stored
    for tensor, old in zip(stored, before, strict=True):
        tensor.copy_(old)


def tensors_of(result: Any) -> list[Tensor]:
    """Return a kernel's outputs as a list, without those that are None."""
    if result is None or isinstance(result, Tensor):
        return [] if result is None else [result]
    return [tensor for part in result for tensor in tensors_of(part)]


def _replay_afresh(call: Call, replay: Run, *_: Any, **__: Any) -> Any:
    """Replay after overwriting what an earlier replay returned and undoing what it stored."""
    with _restored(call):
        for tensor in tensors_of(replay()):
            tensor.fill_(torch.nan if tensor.is_floating_point() else -1)
    return replay()


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


class Clock:
    """Times work on a device; on a GPU each run starts from a cold cache."""

    def __init__(self, device: torch.device) -> None:
        self._flush: Tensor | None = None
        if device.type == "cuda":
            self._flush = torch.empty(_FLUSH_BYTES, dtype=torch.int8, device=device)

    def __call__(self, run: Run) -> float:
        """Return the median seconds of a run."""
        once = max(self._seconds(run, 2))
        count = min(max(int(_TIMED_S / once), _FEWEST), _MOST)
        return statistics.median(self._seconds(run, count))

    def _seconds(self, run: Run, count: int) -> list[float]:
        if self._flush is None:
            times = [time.perf_counter()]
            for _ in range(count):
                run()
                times.append(time.perf_counter())
            return [stop - start for start, stop in pairwise(times)]
        pairs = []
        for number in range(count):
            start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            self._flush.fill_(number)  # it also lets the host get ahead of the device
            start.record()
            run()
            stop.record()
            pairs.append((start, stop))
        torch.cuda.synchronize()
        return [max(float(a.elapsed_time(b)) / 1e3, 1e-9) for a, b in pairs]
