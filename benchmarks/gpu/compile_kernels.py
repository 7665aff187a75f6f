"""Compile every Triton kernel for a GPU that need not be there, in the sizes that models give it.

    python -m benchmarks.gpu.compile_kernels
    python -m benchmarks.gpu.compile_kernels --capability 80 --shape llada2-mini

Nothing runs, so nothing is shown about results or speed: only that the kernels compile, and what a
program of each takes of registers and shared memory. Needs Triton, not a GPU. All tensors are on
torch's meta device, so a kernel whose launch depends on their values would fail here as well: what
compiles does not wait for the device.
"""

import argparse
import json
import re
import subprocess
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from benchmarks.gpu.cases import cases
from benchmarks.gpu.measure import device_facts, source_facts
from benchmarks.gpu.shapes import SHAPES, Work

WORKS = (Work(1, 32, 1024), Work(1, 64, 4096), Work(32, 64, 1024))


def main() -> None:
    parser = argparse.ArgumentParser(description="Compile every Triton kernel without a GPU.")
    parser.add_argument("--out", type=Path, default="/dev/stdout", help="write the report here")
    parser.add_argument("--capability", type=int, default=90, help="90 is Hopper")
    parser.add_argument("--shape", choices=SHAPES, nargs="+", default=[*SHAPES])
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--quick", action="store_true", help="one size of each shape")
    args = parser.parse_args()
    works = WORKS[1:2] if args.quick else WORKS
    made = compile_all(args.capability, args.shape, works, getattr(torch, args.dtype))
    facts = source_facts() | device_facts()
    report = {"facts": facts, "capability": args.capability, "kernels": made}
    args.out.write_text(json.dumps(report, indent=1) + "\n")


def compile_all(
    capability: int, shapes: list[str], works: tuple[Work, ...], dtype: torch.dtype
) -> list[dict[str, Any]]:
    """Return a row for each kernel that came out; an error of the compiler ends the program."""
    from triton import knobs
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver
    from triton.runtime.jit import JITFunction

    from diffray.kernels.choose import triton_kernels

    knobs.runtime.interpret = False
    # What Triton asks of a driver before it compiles, for a GPU that is not there.
    target = GPUTarget("cuda", capability, 32)
    stand_in = SimpleNamespace(
        get_current_target=lambda: target,
        get_current_device=lambda: 0,
        get_current_stream=lambda _device=0: 0,
        get_active_torch_device=lambda: torch.device("meta"),
    )
    driver.set_active(stand_in)
    kernels = triton_kernels()
    rows: list[dict[str, Any]] = []
    seen: set[str] = set()
    launch = JITFunction.run
    place = ""

    def compile_only(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        made = launch(self, *args, grid=grid, warmup=True, **options)
        if made.hash not in seen:
            seen.add(made.hash)
            rows.append({"kernel": self.__name__, "where": place, **_resources(made)})
        return made

    JITFunction.run = compile_only
    try:
        for name in shapes:
            for work in works:
                for case in cases(SHAPES[name], work, dtype, "meta"):
                    place = f"{name}: {case.kernel}, {work.rows} x {work.window}"
                    case.run(kernels)
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
    }


if __name__ == "__main__":
    main()
