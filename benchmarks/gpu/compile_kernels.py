"""Compile Triton's kernels for a GPU that need not be present, in the sizes of the models.

    python -m benchmarks.gpu.compile_kernels
    python -m benchmarks.gpu.compile_kernels --capability 80 --shape llada2-mini

Nothing runs, so this says nothing about results or speed: only that the kernels compile, and how
many registers and how much shared memory a program of each takes. Needs Triton, not a GPU. All
tensors are on torch's meta device, so a kernel whose launch depends on their values would fail here
as well: what compiles does not wait for the device.
"""

import argparse
import json
import re
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch

from benchmarks.gpu.cases import cases
from benchmarks.gpu.measure import device_facts, source_facts
from benchmarks.gpu.shapes import SHAPES, Work
from diffray.kernels.choose import triton_kernels

WORKS = (
    Work(1, 32, 1024),
    Work(1, 64, 4096),
    Work(2, 64, 1024),
    Work(4, 64, 1024),
    Work(32, 64, 1024),
)

MOST_SHARED, MOST_SPILLED = 227 << 10, 96  # bytes of a program, on Hopper
_FLOAT8, _HOPPER = 89, 90  # capabilities: the lowest that converts float8; of the limits above
_HALVES = "rotate_and_store", "paged_attention"  # `attend` compiles them

Place = dict[str, str]


def main() -> None:
    parser = argparse.ArgumentParser(description="Compile Triton's kernels without a GPU.")
    parser.add_argument("--out", type=Path, default="/dev/stdout", help="write the report here")
    parser.add_argument("--capability", type=int, default=90, help="90 is Hopper")
    parser.add_argument("--shape", choices=SHAPES, nargs="+", default=[*SHAPES])
    parser.add_argument("--quick", action="store_true", help="one size of each shape")
    args = parser.parse_args()
    if find_spec("triton") is None:
        raise SystemExit("Triton is not installed: pip install 'diffray[triton]'")
    place: Place = {}  # what is compiled: an error of the compiler ends the program
    with compiled(args.capability, place) as made:
        kernels = triton_kernels()
        for name, work in product(args.shape, WORKS[1:2] if args.quick else WORKS):
            for case in cases(SHAPES[name], work, torch.bfloat16, "meta"):
                old = "float8" in case.kernel and args.capability < _FLOAT8
                if old or case.kernel in _HALVES:
                    continue
                place["where"] = f"{name}: {case.kernel}, {work.rows} x {work.window}"
                case.run(kernels)
    facts = source_facts() | device_facts()
    report = {"facts": facts, "capability": args.capability, "kernels": made}
    args.out.write_text(json.dumps(report, indent=1) + "\n")
    spills = [row for row in made if row["stack_bytes"] + row["local_bytes"] > MOST_SPILLED]
    wrong = [*spills, *(row for row in made if row["shared_bytes"] > MOST_SHARED)]
    if wrong and args.capability >= _HOPPER:
        raise SystemExit(f"{len(wrong)} of {len(made)} do not fit, first {wrong[0]}")


@contextmanager
def compiled(capability: int, place: Place) -> Iterator[list[dict[str, Any]]]:
    """Compile what is launched in the `with` block; yield a row for each kernel and its place."""
    from triton import knobs
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver
    from triton.runtime.jit import JITFunction

    knobs.runtime.interpret = False
    # Answers what Triton asks the driver before it compiles, for an absent GPU.
    stand_in = SimpleNamespace(
        get_current_target=lambda: GPUTarget("cuda", capability, 32),
        get_current_device=lambda: 0,
        get_current_stream=lambda _device=0: 0,
        get_active_torch_device=lambda: torch.device("meta"),
    )
    driver.set_active(stand_in)
    rows: list[dict[str, Any]] = []
    seen: set[str] = set()
    launch = JITFunction.run

    def compile_only(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        made = launch(self, *args, grid=grid, warmup=True, **options)
        if made.hash not in seen:
            seen.add(made.hash)
            rows.append({"kernel": self.__name__, **place, **_resources(made)})
        return made

    with patch.object(JITFunction, "run", compile_only):
        yield rows


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
    source = made.src
    constants = {source.fn.arg_names[at]: value for (at,), value in source.constants.items()}
    products = re.findall(r"\b(wgmma\.mma_async|mma\.sync)\S*", made.asm["ptx"])
    return {
        "constants": {name: value for name, value in constants.items() if name.isupper()},
        "warps": made.metadata.num_warps,
        "stages": made.metadata.num_stages,
        "shared_bytes": made.metadata.shared,
        "registers": numbers["REG"],
        "stack_bytes": numbers["STACK"],
        "local_bytes": numbers["LOCAL"],
        "products": sorted(set(products)),
        "asynchronous_copies": made.asm["ptx"].count("cp.async.c"),
        "fetches": made.asm["ptx"].count("prefetch.global.L2"),
        "waits_for_previous": made.asm["ptx"].count("griddepcontrol.wait"),
    }


if __name__ == "__main__":
    main()
