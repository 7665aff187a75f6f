"""Tries whole steps of one layer: launched with the chosen kernels, and recorded.

Kernels that are right alone may be wrong together: one that is launched before the previous one has
ended may read what has not been written yet.
"""

import time
from collections.abc import Callable
from collections.abc import Sequence as Items
from functools import partial
from typing import Any

import torch
from torch import Tensor

from diffray.components.backend import Record, finish
from diffray.components.mesh import Mesh
from diffray.kernels.choose import TORCH, Kernels
from diffray.kernels.noise import mix
from diffray.kernels.numeric_errors import share_of_rows_beyond
from diffray.kernels.trial import TOLERANCE, one_line
from diffray.kernels.variants import Run
from diffray.workers.bring_up.findings import GraphsOutcome
from diffray.workers.bring_up.one_layer import OneLayer, Sizes, Step
from diffray.workers.graphs import Bucket, Recorded, run_again
from diffray.workers.slots import Slots

_TIMES = 5  # how often a step is repeated
_RUNS = 10  # how many runs are timed
# Share of rows that may be off: rounding may decide which of two near equal experts a token goes
# to. Torch's kernels round differently everywhere, the same kernels only if a library switches
# algorithms.
_OFF_TORCH, _OFF_ITSELF = 0.5, 0.1
_MORE = 4.0  # a whole layer rounds more often than one kernel


@torch.inference_mode()
def combined(sizes: Sizes, device: torch.device, kernels: Kernels) -> str:
    """Return why these kernels cannot be used together; empty if they can."""
    allowed = TOLERANCE[sizes.model().dtype]
    expected = OneLayer(sizes, device, TORCH).results()
    apart = OneLayer(sizes, device, one_at_a_time(kernels, device)).results()
    if (off := _off(apart, expected, _MORE * allowed)) > _OFF_TORCH:
        return f"{off:.0%} of a step's rows differ from torch's"
    layer = OneLayer(sizes, device, kernels)
    for _ in range(_TIMES):
        if (off := _off(layer.results(), apart, allowed)) > 0:
            return f"{off:.0%} of a step's rows differ from those of the same kernels one at a time"
    return ""


def one_at_a_time(kernels: Kernels, device: torch.device) -> Kernels:
    """Return the same kernels, each of which waits for earlier kernels and then for itself."""

    def waiting(run: Run) -> Run:
        def both(*args: Any, **options: Any) -> Any:
            finish(device)
            out = run(*args, **options)
            finish(device)
            return out

        return both

    functions: Items[Run] = kernels[1:]
    return Kernels(kernels.name, *map(waiting, functions))


@torch.inference_mode()
def try_graphs(layer: OneLayer, record: Record) -> GraphsOutcome:
    """Record each step that reads blocks; refuse graphs if one differs or if all are slower.

    The ranks of a layer continue or stop together: a rank that stopped alone would leave the others
    waiting in a collective.
    """
    launched_s = replayed_s = 0.0
    for step in layer.steps:
        if not step.reads:
            continue  # such steps are never recorded
        launched, allowed = _prepared(layer, step, run_again), TOLERANCE[layer.model.dtype]
        try:
            replayed = _prepared(layer, step, _on_all_ranks(layer.mesh, record))
        except _RefusedError as refused:
            return GraphsOutcome(str(refused))
        expected = [tensor.clone() for tensor in launched()]
        for tensor in replayed():
            tensor.fill_(torch.nan)  # results of the last replay must not remain
        first = [tensor.clone() for tensor in replayed()]
        off = _off([first], [expected], allowed)
        for _ in range(_TIMES):
            off = max(off, float(not all(map(torch.equal, replayed(), first))))
        differ = (
            f"{off:.0%} of the rows of {step.windows} x {step.length} positions differ between "
            "replays and launched steps"
        )
        if failure := _agreed(layer.mesh, differ if off > _OFF_ITSELF else ""):
            return GraphsOutcome(failure)
        launched_s += _seconds(launched, layer.device)
        replayed_s += _seconds(replayed, layer.device)
    slower = "replays take longer than launched steps" if replayed_s > launched_s else ""
    return GraphsOutcome(_agreed(layer.mesh, slower), launched_s, replayed_s)


class _RefusedError(Exception):
    """One rank could not record, and all ranks know it."""


def _on_all_ranks(mesh: Mesh, record: Record) -> Record:
    """Return a recorder that raises on all ranks if it fails on one.

    Otherwise the next replay would wait in a collective for the rank that has no recording.
    """

    def both(work: Callable[[], Any]) -> Callable[[], Any]:
        failure, replay = "", work
        try:
            replay = record(work)
        except Exception as error:  # whatever a library raises
            failure = f"a step could not be recorded: {one_line(error)}"
        if failure := _agreed(mesh, failure):
            raise _RefusedError(failure)
        return replay

    return both


def _agreed(mesh: Mesh, refused: str) -> str:
    """Return why this rank or another refuses; empty if none does. All ranks must call this."""
    if mesh.smallest("recordings", int(not refused)):
        return ""
    return refused or "another rank refuses them; its log says why"


def _off(got: Items[Items[Tensor]], expected: Items[Items[Tensor]], allowed: float) -> float:
    """Return the largest share of a step's rows that are off."""
    return max(
        share_of_rows_beyond(allowed, ours, theirs)
        for step, other in zip(got, expected, strict=True)
        for ours, theirs in zip(step, other, strict=True)
    )


def _prepared(layer: OneLayer, step: Step, record: Record) -> Callable[[], list[Tensor]]:
    """Record a step on padding, then return a function that runs it on windows of varied tokens."""
    vocab = layer.model.spec.vocab_size
    slots = Slots(step.windows, step.context, vocab - 1, layer.device)
    cells = torch.arange(slots.ids_SN.numel(), device=layer.device)
    slots.ids_SN.copy_((mix(cells) % vocab).view_as(slots.ids_SN))
    bucket = Bucket(step.windows, step.length)
    recorded = Recorded(bucket, layer.model, layer.kv, slots, record)
    recorded.fill(layer.windows(step))
    recorded.read(torch.arange(bucket.tokens, device=layer.device))
    return partial(_run, recorded)


def _run(recorded: Recorded) -> list[Tensor]:
    """Return hidden states and scores, but not the chosen ids, which may differ in near ties."""
    hidden_TH = recorded.forward()
    chosen = recorded.choose(recorded.bucket.tokens)
    return [hidden_TH, chosen.scores_R, chosen.best_R, chosen.logsumexp_R]


def _seconds(run: Callable[[], object], device: torch.device) -> float:
    """Return the seconds of a run as the host sees it, including its launch."""
    for _ in range(2):
        run()
    finish(device)
    begin = time.perf_counter()
    for _ in range(_RUNS):
        run()
    finish(device)
    return (time.perf_counter() - begin) / _RUNS
