"""Compile variants of kernels for a GPU that need not be there: what each takes, and launches.

    python -m benchmarks.gpu.compile_variants
    python -m benchmarks.gpu.compile_variants --capability 80 --variant "experts.* 64x64x64"

Prints a table of the kernels of each variant: its programs' registers and shared memory, bytes
spilled. `--variant` is a regular expression for "kernel variant". Needs Triton, not a GPU.
"""

import re
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from typing import Any, NamedTuple

import torch

from benchmarks.gpu.cases import EPS, Work, cases
from benchmarks.gpu.compile_kernels import compile_calls
from benchmarks.gpu.measure import PAGE_SIZE, arguments, facts, write_report
from benchmarks.gpu.shapes import SHAPES, Shape
from diffray.components.batch import Batch, Window
from diffray.kernels.attention import KVLayer, QKRotary
from diffray.kernels.choose import TORCH
from diffray.kernels.variants import TORCH_VARIANT, Kernel

PLACES = (
    ("llada-moe-7b-a1b", Work(1, 64, 1024)),
    ("llada-moe-7b-a1b", Work(32, 64, 1024)),
    ("llada2-mini", Work(1, 32, 1024)),
)


class Call(NamedTuple):
    """A call of a kernel with its inputs."""

    kernel: Kernel
    args: tuple[Any, ...]
    options: dict[str, Any]


class _Noted(Exception):
    """Ends a case as soon as its call is known."""


def main() -> None:
    parser = arguments("Compile variants of kernels for a GPU that need not be there.")
    parser.add_argument("--capability", type=int, default=90, help="90 is Hopper")
    parser.add_argument("--variant", default="", help="a regular expression; default: all")
    args = parser.parse_args()
    rows = compile_variants(args.capability, re.compile(args.variant))
    for row in rows:
        spilled = row["stack_bytes"] + row["local_bytes"]
        size = f"{row['registers']:3} registers {row['shared_bytes'] / 1024:4.0f} KB"
        print(f"{row['where']:80} {row['kernel']:15} {size} {spilled:3} B spilled")
    write_report({"facts": facts(), "capability": args.capability, "kernels": rows}, args.out)


def compile_variants(capability: int, wanted: re.Pattern[str]) -> list[dict[str, Any]]:
    """Return a row for each kernel of the variants whose "kernel variant" matches."""

    def runs() -> Iterator[tuple[str, Callable[[], object]]]:
        for name, work in PLACES:
            for call in _calls(SHAPES[name], work):
                for variant in call.kernel.variants(*call.args, **call.options):
                    title = f"{call.kernel.name} {variant.name}"
                    if variant.name != TORCH_VARIANT and wanted.search(title):
                        size = f"{name} {work.rows}x{work.window}"
                        yield f"{size}: {title}", partial(variant.run, *call.args, **call.options)

    return compile_calls(capability, runs())


def _calls(shape: Shape, work: Work) -> Iterator[Call]:
    """Yield a layer's and the head's calls, on torch's meta device."""
    from diffray.kernels.triton.table import KERNELS

    noted: list[Call] = []

    def note(kernel: Kernel) -> Callable[..., Any]:
        def run(*args: Any, **options: Any) -> Any:
            noted.append(Call(kernel, args, options))
            raise _Noted

        return run

    kernels = TORCH._replace(**{kernel.name: note(kernel) for kernel in KERNELS})
    for case in cases(shape, work, torch.bfloat16, "meta"):
        if not case.kernel.startswith(("rotate_and_store", "paged_attention")):
            with suppress(_Noted):
                case.run(kernels)
    with suppress(_Noted):
        kernels.attend(*_attention(shape, work))
    yield from noted


def _attention(shape: Shape, work: Work) -> tuple[Any, ...]:
    """Return the arguments of a step's attention."""
    meta, size = torch.device("meta"), shape.head_dim
    pages = -(-work.context // PAGE_SIZE)
    pages_RP = torch.arange(work.rows * pages).view(work.rows, pages)
    start = work.context - work.window
    windows = [Window(start, work.context, work.context, shape.block, own_P) for own_P in pages_RP]
    batch = Batch.pack(windows, meta, PAGE_SIZE)
    bfloat16 = {"dtype": torch.bfloat16, "device": meta}
    heads = torch.empty(work.tokens, shape.heads + 2 * shape.kv_heads, size, **bfloat16)
    pool = torch.empty(pages_RP.numel() * PAGE_SIZE, shape.kv_heads, size, **bfloat16)
    angles = torch.empty(work.tokens, 1, shape.rotated, device=meta)
    norm = torch.empty(shape.heads + shape.kv_heads, size, **bfloat16)
    rotary = QKRotary(norm if shape.head_norm else None, EPS, angles, angles)
    return heads, rotary, KVLayer(pool, pool), batch.slots_T, batch.windows


if __name__ == "__main__":
    main()
