"""Tries what needs all ranks, in a separate process on each: one-shot sums and recorded steps.

These processes connect as the ranks did. One-shot sums are used up to the largest size at which
they are right and faster than the group's on every rank: if one rank did not take part, the others
would wait for it forever. Then steps of one layer are recorded with their collectives.
"""

import importlib
import time
from collections.abc import Callable
from collections.abc import Sequence as Items
from dataclasses import replace
from pkgutil import resolve_name
from typing import Final, NamedTuple

import torch
from pydantic import TypeAdapter
from torch import Tensor

from diffray.components.backend import DTYPES, Record, finish, make_current
from diffray.components.config import Config
from diffray.components.mesh import Mesh, OneShot, Sum, join_store, open_store
from diffray.kernels.checksum import checksum
from diffray.kernels.choose import with_variants
from diffray.kernels.noise import spread
from diffray.kernels.numeric_errors import share_of_rows_beyond
from diffray.kernels.trial import TOLERANCE, Selection, choices_of, one_line
from diffray.kernels.variants import Kernel
from diffray.workers.bring_up.findings import GraphsOutcome, SumsOutcome
from diffray.workers.bring_up.one_layer import OneLayer
from diffray.workers.bring_up.step_trial import try_graphs
from diffray.workers.bring_up.trial_process import GRAPHS, Say, TrialPlan, answer_parent
from diffray.workers.bring_up.trials import ChildProcess

OPENER: Final = "diffray.components.mesh:open_one_shot"
RECORDER: Final = "diffray.components.backend:cuda_recorder"
PATIENCE_S: Final = 17.0  # for the processes to start, connect and try everything
OUTCOME: Final[TypeAdapter[SumsOutcome]] = TypeAdapter(SumsOutcome)
_BYTES: Final = tuple(1 << power for power in range(13, 22))
_APART: Final = "the ranks are on several machines"
_ROW = 1024  # numbers
_TIMES, _RUNS = 5, 50  # how often a sum is compared, and timed


class SumPlan(Config):
    """How the ranks' processes connect, and what they try."""

    rank: int
    size: int
    host: str
    port: int
    device: str
    dtype: str
    # Its outcomes say which kernels to record in steps; None: neither steps nor sums are recorded.
    steps: TrialPlan | None = None
    selection: Selection = "fastest"
    on_one_machine: bool = True  # otherwise there are no one-shot sums
    opener: str = OPENER
    recorder: str = RECORDER
    patience_s: float = PATIENCE_S


class GroupOutcome(NamedTuple):
    """What the ranks found together."""

    sums: SumsOutcome
    graphs: GraphsOutcome | None  # None: no steps had to be recorded


def try_together(
    mesh: Mesh,
    dtype: str,
    *,
    steps: TrialPlan | None = None,
    selection: Selection = "fastest",
    opener: str = OPENER,
    recorder: str = RECORDER,
    patience_s: float = PATIENCE_S,
) -> GroupOutcome:
    """Return what is right and faster on all ranks; all of them must call this."""
    on_one_machine = mesh.on_one_machine()
    if not on_one_machine and steps is None:
        return GroupOutcome(SumsOutcome(refused=_APART), None)
    assert mesh.store is not None, "ranks meet at a store"
    host = mesh.store.host
    store = open_store(host, timeout=patience_s) if mesh.rank == 0 else None
    port = int(mesh.share("port of the sums", "" if store is None else str(store.port)))
    plan = SumPlan(
        rank=mesh.rank,
        size=mesh.size,
        host=host,
        port=port,
        device=str(mesh.device),
        dtype=dtype,
        steps=steps,
        selection=selection,
        on_one_machine=on_one_machine,
        opener=opener,
        recorder=recorder,
        patience_s=patience_s,
    )
    own, recorded = _tried(plan)
    most = mesh.smallest("bytes of a one-shot sum", own.most_bytes)
    if most < own.most_bytes:
        own = replace(own, refused="" if most else "another rank refused it; its log says why")
    if recorded is not None:  # another rank's process may have failed
        fine = mesh.smallest("recorded steps", int(not recorded.refused))
        others = "" if fine else "another rank refuses them; its log says why"
        recorded = replace(recorded, refused=recorded.refused or others)
    return GroupOutcome(replace(own, most_bytes=most), recorded)


def _tried(plan: SumPlan) -> GroupOutcome:
    """Return what this rank's process finds, or how it failed."""
    until = time.monotonic() + plan.patience_s
    sums: SumsOutcome | None = None
    graphs: GraphsOutcome | None = None
    failure = "it reported nothing"
    with ChildProcess("diffray.workers.bring_up.sum_trial", plan) as process:
        while True:
            try:
                message = process.message(max(until - time.monotonic(), 0.0))
            except TimeoutError:
                failure = f"it did not end within {plan.patience_s:g} s"
                break
            if message is None:
                failure = process.ending()
                break
            if "end" in message:
                break
            if "sums" in message:
                sums = OUTCOME.validate_python(message["sums"])
            if "graphs" in message:
                graphs = GRAPHS.validate_python(message["graphs"])
    if graphs is None and plan.steps is not None:
        graphs = GraphsOutcome(failure)
    return GroupOutcome(sums or SumsOutcome(refused=failure), graphs)


def use_one_shot(
    mesh: Mesh, found: SumsOutcome | None, say: Callable[[str], None], *, opener: str = OPENER
) -> Mesh:
    """Return a mesh that sums in one shot if that was found faster; all ranks must call this."""
    if found is None or not found.most_bytes or not mesh.on_one_machine():
        return mesh
    dtype, add_up, failure = DTYPES[found.dtype], None, "another rank cannot"
    try:
        add_up = resolve_name(opener)(mesh, dtype, found.most_bytes)
    except Exception as error:  # whatever torch or the driver raises
        failure = one_line(error)
    if not mesh.smallest("one-shot sums", int(add_up is not None)) or add_up is None:
        say(f"all-reduce: one-shot sums are no longer used: {failure}")
        return mesh
    return replace(mesh, one_shot=OneShot(add_up, dtype, found.most_bytes))


def main() -> None:
    answer_parent(lambda order, say: _try_all(SumPlan.model_validate_json(order), say))


@torch.inference_mode()
def _try_all(plan: SumPlan, say: Say) -> None:
    """Compare and time all sizes as one of the ranks."""
    device = torch.device(plan.device)
    make_current(device)
    store = join_store(plan.host, plan.port, timeout=plan.patience_s)
    mesh = Mesh.connect(
        store,
        plan.rank,
        plan.size,
        device=device,
        timeout=plan.patience_s,
        expert_parallel=plan.steps is not None and plan.steps.sizes.expert_parallel,
    )
    found = _try_sums(plan, mesh) if plan.on_one_machine else SumsOutcome(refused=_APART)
    say(sums=OUTCOME.dump_python(found, mode="json"))
    if plan.steps is not None:
        most = mesh.smallest("bytes of a one-shot sum", found.most_bytes)
        mesh = use_one_shot(mesh, replace(found, most_bytes=most), print, opener=plan.opener)
        table: Items[Kernel] = importlib.import_module(plan.steps.table).KERNELS
        kernels = with_variants("triton", table, choices_of(plan.steps.done, plan.selection))
        layer = OneLayer(plan.steps.sizes, device, kernels, mesh)
        graphs = try_graphs(layer, resolve_name(plan.recorder)())
        say(graphs=GRAPHS.dump_python(graphs, mode="json"))
    mesh.smallest("done", 1)  # a rank that ends earlier would break the others' connections


def _try_sums(plan: SumPlan, mesh: Mesh) -> SumsOutcome:
    """Return the largest size at which one-shot sums are right and faster on this rank."""
    dtype, add_up, failure = DTYPES[plan.dtype], None, "another rank cannot"
    try:
        add_up = resolve_name(plan.opener)(mesh, dtype, _BYTES[-1])
    except Exception as error:  # whatever torch or the driver raises
        failure = one_line(error)
    if not mesh.smallest("opened", int(add_up is not None)) or add_up is None:
        return SumsOutcome(refused=failure)
    record = None if plan.steps is None else resolve_name(plan.recorder)()
    return replace(_compared(mesh, add_up, dtype, record), dtype=plan.dtype)


def _compared(mesh: Mesh, add_up: Sum, dtype: torch.dtype, record: Record | None) -> SumsOutcome:
    """Return the largest size up to which sums are right and faster here.

    All sizes are tried in any case, because the other ranks wait for this one.
    """
    best, refused = SumsOutcome(), ""
    for most_bytes in _BYTES:
        x = torch.empty(most_bytes // dtype.itemsize, dtype=dtype, device=mesh.device)
        x = x.view(-1, _ROW)
        one_shot = _recorded(add_up, x, record)
        wrong = _wrong(mesh, one_shot, x, TOLERANCE[dtype])
        group = _recorded(mesh.all_reduce, x, record)
        ours, theirs = _seconds(one_shot, mesh), _seconds(group, mesh)
        if not wrong and ours >= theirs:
            wrong = f"{ours * 1e6:.0f} us, but the group's takes {theirs * 1e6:.0f}"
        refused = refused or (wrong and f"{most_bytes} bytes: {wrong}")
        if not refused:
            best = SumsOutcome(most_bytes, one_shot_s=ours, group_s=theirs)
    return best if best.most_bytes else SumsOutcome(refused=refused)


def _recorded(add_up: Sum, x: Tensor, record: Record | None) -> Callable[[], Tensor]:
    """Return a function that sums the current values of `x`."""

    def run() -> Tensor:
        return add_up(x.clone())

    return run if record is None else record(run)


def _wrong(mesh: Mesh, one_shot: Callable[[], Tensor], x: Tensor, allowed: float) -> str:
    """Return how sums of different numbers differ from the group's; empty if they do not."""
    wrong = ""
    for turn in range(_TIMES):
        spread(x, turn * mesh.size + mesh.rank, 1.0)
        expected, got = mesh.all_reduce(x.clone()), one_shot()
        if not bool(mesh.all_equal(checksum(got.view(torch.int32)))):
            wrong = wrong or "the ranks' sums differ"
        if (off := share_of_rows_beyond(allowed, got, expected)) > 0:
            wrong = wrong or f"{off:.0%} of the rows are wrong"
    return wrong


def _seconds(run: Callable[[], Tensor], mesh: Mesh) -> float:
    """Return the seconds of a sum."""
    assert mesh.device is not None, "ranks have a device"
    finish(mesh.device)
    mesh.all_gather(torch.zeros(1, device=mesh.device))  # all ranks start together
    begin = time.perf_counter()
    for _ in range(_RUNS):
        run()
    finish(mesh.device)
    return (time.perf_counter() - begin) / _RUNS


if __name__ == "__main__":
    main()
