"""Compile every Triton kernel for a GPU that need not be there, in the sizes that models give it.

    python -m benchmarks.gpu.compile_kernels
    python -m benchmarks.gpu.compile_kernels --capability 80 --shape llada2-mini

Nothing runs, so nothing is shown about results or speed: only that the kernels compile, and what a
program of each takes of registers and shared memory. Needs Triton, not a GPU. All tensors are on
torch's meta device, so a kernel whose launch depends on their values would fail here as well: what
compiles does not wait for the device.
"""

import re
import subprocess
import tempfile
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu.cases import Work, cases
from benchmarks.gpu.measure import arguments, facts, write_report
from benchmarks.gpu.shapes import SHAPES

WORKS = (Work(1, 32, 1024), Work(1, 64, 4096), Work(32, 64, 1024))


class Target:
    """What Triton asks of a driver before it compiles, for a GPU that is not there."""

    def __init__(self, capability: int) -> None:
        self.capability = capability

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", self.capability, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, _device: int = 0) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return torch.device("meta")


def main() -> None:
    parser = arguments("Compile every Triton kernel for a GPU that need not be there.")
    parser.add_argument("--capability", type=int, default=90, help="90 is Hopper")
    parser.add_argument("--shape", choices=SHAPES, action="append", help="default: all")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--quick", action="store_true", help="one size of each shape")
    args = parser.parse_args()
    shapes = args.shape or list(SHAPES)
    works = WORKS[1:2] if args.quick else WORKS
    made = compile_all(args.capability, shapes, works, getattr(torch, args.dtype))
    report = {"facts": facts(), "capability": args.capability, "kernels": made}
    write_report(report, args.out)


def compile_all(
    capability: int, shapes: list[str], works: tuple[Work, ...], dtype: torch.dtype
) -> list[dict[str, Any]]:
    """Compile every kernel in its default variant."""
    from diffray.kernels.choose import triton_kernels

    def calls() -> Iterator[tuple[str, Callable[[], object]]]:
        kernels = triton_kernels()
        for name, work in product(shapes, works):
            for case in cases(SHAPES[name], work, dtype, "meta"):
                place = f"{name}: {case.kernel}, {work.rows} x {work.window}"
                yield place, partial(case.run, kernels)

    return compile_calls(capability, calls())


def compile_calls(
    capability: int, calls: Iterable[tuple[str, Callable[[], object]]]
) -> list[dict[str, Any]]:
    """Return a row for each kernel that came out; an error of the compiler ends the program."""
    from triton import knobs
    from triton.runtime import driver
    from triton.runtime.jit import JITFunction

    knobs.runtime.interpret = False
    driver.set_active(Target(capability))
    rows: list[dict[str, Any]] = []
    seen: set[str] = set()
    launch, place = JITFunction.run, ""

    def compile_only(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        made = launch(self, *args, grid=grid, warmup=True, **options)
        if made.hash not in seen:
            seen.add(made.hash)
            rows.append({"kernel": self.__name__, "where": place, **_resources(made)})
        return made

    JITFunction.run = compile_only
    try:
        for place, call in calls:  # noqa: B007  # for `compile_only`
            call()
    finally:
        JITFunction.run = launch
    return rows


def _resources(made: Any) -> dict[str, Any]:
    """Return what one program of a compiled kernel takes."""
    import triton

    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(made.asm["cubin"])
        file.flush()
        command = [str(tool), "--dump-resource-usage", file.name]
        told = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    numbers = {key: int(value) for key, value in re.findall(r"(REG|STACK|LOCAL):(\d+)", told)}
    products = re.findall(r"\b(wgmma\.mma_async|mma\.sync)\S*", made.asm["ptx"])
    return {
        "warps": made.metadata.num_warps,
        "shared_bytes": made.metadata.shared,
        "registers": numbers["REG"],
        "stack_bytes": numbers["STACK"],
        "local_bytes": numbers["LOCAL"],
        "products": sorted(set(products)),
        "asynchronous_copies": made.asm["ptx"].count("cp.async.c"),
        "waits_for_previous": made.asm["ptx"].count("griddepcontrol.wait"),
    }


if __name__ == "__main__":
    main()
