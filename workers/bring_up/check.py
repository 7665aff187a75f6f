"""Checks the kernels for a model on a GPU: the work of the child process.

It reads a `CheckPlan` from its standard input and writes one JSON object per line to its standard
output. It announces each kernel before it runs it: if the process dies, its parent knows what to
refuse, and starts another process for the rest.
"""

import ctypes
import importlib
import json
import os
import resource
import signal
import sys
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Items
from contextlib import suppress
from typing import Any

import torch
from pydantic import Field
from torch import Tensor

from diffray.components.backend import finish, make_current
from diffray.components.config import Config
from diffray.components.container import usable_cores
from diffray.kernels.choose import TORCH, Kernels, for_this_gpu, with_programs
from diffray.kernels.kernel import TOLERANCE, Kernel, Run
from diffray.kernels.numeric_errors import share_of_rows_beyond
from diffray.kernels.verify import one_line, verified
from diffray.workers.bring_up.one_layer import OneLayer, Sizes

_PR_SET_PDEATHSIG = 1
DEVICE_FAILED = 3  # the exit status after an error that the process cannot recover from

_TIMES = 5  # how often a step is repeated
# Share of rows that may be off: rounding may decide between two near equal experts of a token.
_OFF_TORCH = 0.5
_MORE = 4.0  # a whole layer rounds more often than one kernel

Say = Callable[..., None]


class CheckPlan(Config):
    """What to check."""

    sizes: Sizes
    device: str
    table: str  # the module whose KERNELS are checked
    refused: Mapping[str, str] = Field(default_factory=dict)  # what earlier processes found
    ahead: bool = True  # whether all kernels are compiled first; False after a crash while doing so


def main() -> None:
    plan = CheckPlan.model_validate_json(sys.stdin.readline())
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)  # it ends with its parent
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # kernels may crash; a dump takes long
    # What libraries print goes to standard error.
    out = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)

    def say(**message: Any) -> None:
        out.write(json.dumps(message) + "\n")

    check(plan, say)
    say(end=True)
    out.flush()
    os._exit(0)  # a driver may take long to let a process go


@torch.inference_mode()
def check(plan: CheckPlan, say: Say) -> None:
    """Compare every kernel with torch's, then steps of all together."""
    device = torch.device(plan.device)
    make_current(device)
    table = for_this_gpu(importlib.import_module(plan.table).KERNELS)
    refused = dict(plan.refused)
    if plan.ahead and device.type == "cuda":
        say(begin="compiling")
        _compile(plan.sizes, device, with_programs(table, refused.keys()))
    called = set(refused)
    checking = {each.name: _checking(each, device, refused, called, say) for each in table}
    OneLayer(plan.sizes, device, TORCH._replace(name="triton", **checking)).run()
    if called == refused.keys():
        return say(failed="every kernel is refused")
    say(begin="together")
    kernels = with_programs(table, refused.keys())
    if wrong := unlike(plan.sizes, device, kernels):
        say(failed=f"they are wrong together: {wrong}")


def _checking(
    kernel: Kernel, device: torch.device, refused: dict[str, str], called: set[str], say: Say
) -> Run:
    """Return the reference, which compares each call with the program until that is refused."""

    def run(*args: Any, **options: Any) -> Any:
        called.add(kernel.name)
        if kernel.name in refused:
            return kernel.reference(*args, **options)
        say(begin=kernel.name)
        out, why = verified(kernel, args, options, ran)
        if why and kernel.name not in refused:
            refuse(why)
        return out

    def ran(why: str) -> None:
        if why:
            refuse(why)
            _end_if_device_failed(device)  # before the reference fails for it
        say(begin="")

    def refuse(why: str) -> None:
        refused[kernel.name] = why
        say(refused=kernel.name, why=why)

    return run


def _compile(sizes: Sizes, device: torch.device, kernels: Kernels) -> None:
    """Compile all kernels in parallel; those that do not compile raise when they run."""
    from diffray.kernels.triton.compile_ahead import compiled_ahead

    def both(program: Run, reference: Run) -> Run:
        def run(*args: Any, **options: Any) -> Any:
            with suppress(Exception):
                program(*args, **options)
            return reference(*args, **options)

        return run

    programs: Items[Run] = kernels[1:]
    references: Items[Run] = TORCH[1:]
    compiling = Kernels("triton", *map(both, programs, references))
    with compiled_ahead(usable_cores()):
        OneLayer(sizes, device, compiling).run()


def _end_if_device_failed(device: torch.device) -> None:
    """End the process after an error that also fails later calls, such as an illegal access."""
    try:
        torch.ones(1, device=device).add_(1).item()
    except RuntimeError as failure:
        print(f"the device no longer works: {one_line(failure)}", file=sys.stderr, flush=True)
        os._exit(DEVICE_FAILED)


@torch.inference_mode()
def unlike(sizes: Sizes, device: torch.device, kernels: Kernels) -> str:
    """Return why these kernels cannot be used together; empty if they can.

    Kernels that are right alone may be wrong together: one that is launched before the previous one
    has ended may read what has not been written yet.
    """
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


def _off(got: Items[Items[Tensor]], expected: Items[Items[Tensor]], allowed: float) -> float:
    """Return the largest share of a step's rows that are off."""
    return max(
        share_of_rows_beyond(allowed, ours, theirs)
        for step, other in zip(got, expected, strict=True)
        for ours, theirs in zip(step, other, strict=True)
    )


if __name__ == "__main__":
    main()
