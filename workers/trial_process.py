"""The child of bring-up: it tries every variant, and may crash in doing so.

It reads an `Order` from its standard input and writes a JSON object per line to its standard
output. Each trial is announced before it begins: if the process dies, its parent knows in which
one, and starts another process for those that are left. It ends when its input ends, so that it
does not outlive its parent.
"""

import importlib
import json
import os
import sys
import threading
import time
from collections.abc import Callable
from collections.abc import Sequence as Items
from contextlib import suppress
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from pydantic import TypeAdapter

from diffray.components.backend import Record, cuda_recorder, make_current
from diffray.components.config import Config
from diffray.components.container import usable_cores
from diffray.kernels.choose import TORCH, Kernels, with_variants
from diffray.kernels.trial import Call, Clock, Outcome, attempt, choices_of, said
from diffray.kernels.variants import TORCH_VARIANT, Kernel, Run, Shape, Variant
from diffray.workers.findings import GraphsOutcome
from diffray.workers.one_layer import OneLayer, Sizes
from diffray.workers.step_trial import combined, try_graphs

UNWELL = 3  # the exit status when the device no longer works

OUTCOME: TypeAdapter[Outcome] = TypeAdapter(Outcome)
GRAPHS: TypeAdapter[GraphsOutcome] = TypeAdapter(GraphsOutcome)

Calls = dict[tuple[str, Shape], list[Call]]


class Order(Config):
    """What to try."""

    sizes: Sizes
    device: str
    table: str  # the module whose KERNELS are tried
    graphs: bool  # whether steps may be recorded
    until: float  # on the monotonic clock; then only what is needed is tried
    done: tuple[Outcome, ...] = ()  # the outcomes of processes before this one
    defaults: bool = False  # whether the fastest variants turned out to be wrong together
    ahead: bool = True  # compile some variants at a time, on all cores; False after a crash in that


class Trial(NamedTuple):
    """A variant, and the calls of one shape on which it is tried."""

    calls: list[Call]
    variant: Variant
    default: bool

    @property
    def needed(self) -> bool:
        """Whether to try it whatever the time: without it a shape may have nothing to run."""
        return self.default or self.variant.name == TORCH_VARIANT

    @property
    def begin(self) -> Outcome:
        """What is known of it before it is tried."""
        first = self.calls[0]
        return Outcome(first.kernel.name, first.shape, self.variant.name, default=self.default)


def main() -> None:
    order = Order.model_validate_json(sys.stdin.readline())
    threading.Thread(target=_end_with_input, daemon=True).start()
    # Libraries may print; what they print goes to standard error.
    out = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)

    def say(**message: Any) -> None:
        out.write(json.dumps(message) + "\n")

    try_all(order, say)
    say(end=True)
    out.flush()
    os._exit(0)  # a thread still reads the input


def _end_with_input() -> None:
    while os.read(0, 1 << 16):  # sys.stdin's lock would keep an error from ending the process
        pass
    os._exit(1)


def try_all(order: Order, say: Callable[..., None]) -> None:
    """Try what is left; say how much that is, what begins, and what became of it."""
    device = torch.device(order.device)
    make_current(device)
    record = cuda_recorder() if order.graphs and device.type == "cuda" else None
    table: Items[Kernel] = importlib.import_module(order.table).KERNELS
    outcomes = _try_variants(order, table, device, record, say)
    for defaults in (True,) if order.defaults else (False, True):
        say(combining=True)
        kernels = with_variants("triton", table, choices_of(outcomes, defaults=defaults))
        wrong = combined(order.sizes, device, kernels)
        say(combined=wrong)
        if not wrong:
            break
    else:
        return
    if record is not None:
        say(recording=True)
        graphs = try_graphs(OneLayer(order.sizes, device, kernels), record)
        say(graphs=GRAPHS.dump_python(graphs, mode="json"))


def _try_variants(
    order: Order,
    table: Items[Kernel],
    device: torch.device,
    record: Record | None,
    say: Callable[..., None],
) -> list[Outcome]:
    """Return the outcomes of all trials, of earlier processes too."""
    calls: Calls = {}
    OneLayer(order.sizes, device, noting(table, calls)).run()
    outcomes, clock = list(order.done), Clock(device)
    trials = trials_of(calls, order.done)
    say(total=len(trials))
    ahead = 2 * usable_cores() if order.ahead and device.type == "cuda" else 1
    for first in range(0, len(trials), ahead):
        chunk = trials[first : first + ahead]
        if not any(trial.needed for trial in chunk) and time.monotonic() > order.until:
            break
        if ahead > 1:
            say(compiling=True)
            _compile([trial for trial in chunk if not _refused(trial, outcomes)])
        for trial in chunk:
            if _refused(trial, outcomes):
                say(skipped=True)
                continue
            say(begin=OUTCOME.dump_python(trial.begin, mode="json"))
            with torch.inference_mode():
                outcome = attempt(trial.calls, trial.variant, clock, record)
            outcomes.append(replace(outcome, default=trial.default))
            say(outcome=OUTCOME.dump_python(outcomes[-1], mode="json"))
            if outcomes[-1].refused:
                _end_if_unwell(outcomes[-1], device)
    return outcomes


def _compile(trials: Items[Trial]) -> None:
    """Compile these variants at once; errors are left to the trials."""
    from diffray.kernels.triton.compile_ahead import compiled_ahead

    with torch.inference_mode(), compiled_ahead(usable_cores()):
        for calls, variant, _ in trials:
            if variant.name != TORCH_VARIANT:
                with suppress(Exception):
                    variant.run(*calls[0].args, **calls[0].options)


def _refused(trial: Trial, outcomes: Items[Outcome]) -> bool:
    """Whether this variant was refused at another shape."""
    mine = trial.begin.kernel, trial.begin.variant
    return any(each.refused and (each.kernel, each.variant) == mine for each in outcomes)


def noting(table: Items[Kernel], calls: Calls) -> Kernels:
    """Return kernels that run the references of the table and note the calls by shape."""

    def noted(kernel: Kernel) -> Run:
        def run(*args: Any, **options: Any) -> Any:
            call = Call(kernel, args, options)
            calls.setdefault((kernel.name, call.shape), []).append(call)
            return kernel.reference(*args, **options)

        return run

    return TORCH._replace(name="noting", **{kernel.name: noted(kernel) for kernel in table})


def trials_of(calls: Calls, done: Items[Outcome]) -> list[Trial]:
    """Return what is left to try: the defaults of all shapes, torch's, then one of each in turn."""
    known = {(each.kernel, each.shape, each.variant) for each in done}
    ranked = []
    for (kernel, shape), own in calls.items():
        default, *others, reference = own[0].variants
        for rank, variant in enumerate([default, reference, *others]):
            if (kernel, shape, variant.name) not in known:
                ranked.append((rank, Trial(own, variant, rank == 0)))
    return [trial for _, trial in sorted(ranked, key=lambda each: each[0])]


def _end_if_unwell(outcome: Outcome, device: torch.device) -> None:
    """End the process after an error that outlives its trial, as an illegal access does."""
    try:
        torch.ones(1, device=device).add_(1).item()
        if not outcome.spoiled:
            return
    except RuntimeError as failure:
        print(f"the device no longer works: {said(failure)}", file=sys.stderr, flush=True)
    os._exit(UNWELL)


if __name__ == "__main__":
    main()
