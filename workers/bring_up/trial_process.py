"""Tries every variant in a separate process, which may crash.

The process reads a `TrialPlan` from its standard input and writes one JSON object per line to its
standard output. It announces each trial before it starts: if the process dies, its parent knows in
which trial, and starts another process for the rest. It ends when its input ends, so that it does
not outlive its parent.
"""

import importlib
import json
import os
import resource
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
from diffray.kernels.trial import (
    SELECTIONS,
    Call,
    Clock,
    Outcome,
    Selection,
    attempt,
    choices_of,
    one_line,
)
from diffray.kernels.variants import TORCH_VARIANT, Kernel, Run, Shape, Variant
from diffray.workers.bring_up.findings import GraphsOutcome
from diffray.workers.bring_up.one_layer import OneLayer, Sizes
from diffray.workers.bring_up.step_trial import combined, try_graphs

DEVICE_FAILED = 3  # the exit status after an error that the process cannot recover from
_MOST_AHEAD = 16  # variants to compile at once, which must take less than the limit of a trial

OUTCOME: TypeAdapter[Outcome] = TypeAdapter(Outcome)
GRAPHS: TypeAdapter[GraphsOutcome] = TypeAdapter(GraphsOutcome)

Calls = dict[tuple[str, Shape], list[Call]]
Say = Callable[..., None]


class TrialPlan(Config):
    """What to try."""

    sizes: Sizes
    device: str
    table: str  # the module whose KERNELS are tried
    graphs: bool  # whether steps may be recorded
    until: float = 0.0  # on the monotonic clock; afterwards only needed trials run
    done: tuple[Outcome, ...] = ()  # the outcomes of earlier processes and starts
    selections: tuple[Selection, ...] = SELECTIONS  # the selections still to try in whole steps
    right: bool = False  # whether a selection has already been found right
    compile_ahead: bool = True  # several variants at a time; False after a crash while doing so


class Trial(NamedTuple):
    """A variant, and the calls of one shape on which it is tried."""

    calls: list[Call]
    variant: Variant
    default: bool

    @property
    def needed(self) -> bool:
        """Whether it is tried even after the time is up."""
        return self.default

    @property
    def begin(self) -> Outcome:
        """The outcome before it has been tried."""
        first = self.calls[0]
        return Outcome(first.kernel.name, first.shape, self.variant.name, default=self.default)


def main() -> None:
    answer_parent(lambda order, say: try_all(TrialPlan.model_validate_json(order), say))


def answer_parent(work: Callable[[str, Say], None]) -> None:
    """Carry out the order in the input's first line, report the results, and end the process."""
    order = sys.stdin.readline()
    threading.Thread(target=_end_with_input, daemon=True).start()
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # trials may crash; a dump takes long
    # What libraries print goes to standard error.
    out = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)

    def say(**message: Any) -> None:
        out.write(json.dumps(message) + "\n")

    work(order, say)
    say(end=True)
    out.flush()
    os._exit(0)  # a thread still reads the input


def _end_with_input() -> None:
    while os.read(0, 1 << 16):  # sys.stdin's lock would keep an error from ending the process
        pass
    os._exit(1)


def try_all(plan: TrialPlan, say: Say) -> None:
    """Run the remaining trials; report how many there are, each one's start, and its outcome."""
    device = torch.device(plan.device)
    make_current(device)
    record = cuda_recorder() if plan.graphs else None
    table: Items[Kernel] = importlib.import_module(plan.table).KERNELS
    outcomes = _try_variants(plan, table, device, record, say)
    right = plan.right
    for selection in plan.selections:
        choices = choices_of(outcomes, selection)
        if selection == "defaults" and right:
            break
        if selection == "early" and (record is None or choices == choices_of(outcomes)):
            continue  # only replays, which do not wait for the host, show what starting early saves
        kernels = with_variants("triton", table, choices)
        say(combining=selection)
        wrong = combined(plan.sizes, device, kernels)
        say(combined=selection, wrong=wrong)
        right |= not wrong
        if record is not None and not wrong:
            say(recording=selection)
            graphs = try_graphs(OneLayer(plan.sizes, device, kernels), record)
            say(recorded=selection, graphs=GRAPHS.dump_python(graphs, mode="json"))


def _try_variants(
    plan: TrialPlan,
    table: Items[Kernel],
    device: torch.device,
    record: Record | None,
    say: Say,
) -> list[Outcome]:
    """Return the outcomes of all trials, including those of earlier processes."""
    calls: Calls = {}
    OneLayer(plan.sizes, device, collecting(table, calls)).run()
    outcomes, clock = list(plan.done), Clock(device)
    trials = trials_of(calls, plan.done)
    say(total=len(trials))
    compiles = plan.compile_ahead and device.type == "cuda"
    ahead = min(usable_cores(), _MOST_AHEAD) if compiles else 1
    for first in range(0, len(trials), ahead):
        chunk = trials[first : first + ahead]
        if not any(trial.needed for trial in chunk) and time.monotonic() > plan.until:
            break
        if compiles:
            say(compiling=True)
            _compile([trial for trial in chunk if not _refused(trial, outcomes)])
        for trial in chunk:
            if not trial.needed and time.monotonic() > plan.until:
                break
            if _refused(trial, outcomes):
                say(skipped=True)
                continue
            say(begin=OUTCOME.dump_python(trial.begin, mode="json"))
            with torch.inference_mode():
                outcome = attempt(trial.calls, trial.variant, clock, record)
            outcomes.append(replace(outcome, default=trial.default))
            say(outcome=OUTCOME.dump_python(outcomes[-1], mode="json"))
            if outcomes[-1].refused:
                _end_if_device_failed(outcomes[-1], device)
    return outcomes


def _compile(trials: Items[Trial]) -> None:
    """Compile these variants in parallel; their trials report errors."""
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


def collecting(table: Items[Kernel], calls: Calls) -> Kernels:
    """Return kernels that run the table's references and collect the calls by shape."""

    def collected(kernel: Kernel) -> Run:
        def run(*args: Any, **options: Any) -> Any:
            call = Call(kernel, args, options)
            calls.setdefault((kernel.name, call.shape), []).append(call)
            return kernel.reference(*args, **options)

        return run

    return TORCH._replace(name="collecting", **{kernel.name: collected(kernel) for kernel in table})


def trials_of(calls: Calls, done: Items[Outcome]) -> list[Trial]:
    """Return the remaining trials: the defaults, then the other variants in turn, torch's last.

    Whatever there is no time for, the choice is never slower than the default.
    """
    known = {(each.kernel, each.shape, each.variant) for each in done}
    ranked = []
    for (kernel, shape), own in calls.items():
        for index, variant in enumerate(own[0].variants):
            if (kernel, shape, variant.name) not in known:
                place = variant.name == TORCH_VARIANT, index
                ranked.append((place, Trial(own, variant, index == 0)))
    return [trial for _, trial in sorted(ranked, key=lambda each: each[0])]


def _end_if_device_failed(outcome: Outcome, device: torch.device) -> None:
    """End the process after an error that also fails later calls, such as an illegal access."""
    try:
        torch.ones(1, device=device).add_(1).item()
        if not outcome.spoiled:
            return
    except RuntimeError as failure:
        print(f"the device no longer works: {one_line(failure)}", file=sys.stderr, flush=True)
    os._exit(DEVICE_FAILED)


if __name__ == "__main__":
    main()
