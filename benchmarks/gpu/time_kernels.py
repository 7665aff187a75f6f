"""Time each Triton kernel on the GPU against the least that the device needs for it.

    python -m benchmarks.gpu.time_kernels
    python -m benchmarks.gpu.time_kernels --shape llada-8b --rows 1 --out kernels.json

The floor is the larger of bytes over measured copy bandwidth and operations over the measured rate
of a large bfloat16 product. A kernel of a few microseconds cannot come near it: a launch alone
takes two or three. Each call is captured in a CUDA graph where it can be, runs from a cold cache,
and is timed by events; medians. Beside them: torch's form of each, and for attention `varlen_attn`,
whose keys lie side by side, as pages do not.
"""

from functools import partial
from typing import Any

import torch

from benchmarks.gpu.cases import Case, Work, cases
from benchmarks.gpu.measure import Clock, arguments, facts, graphed, need_cuda, write_report
from benchmarks.gpu.shapes import SHAPES
from diffray.kernels.choose import TORCH, Kernels, triton_kernels

# Torch's forms of these read integers on the host, which no graph can hold.
_ASK_THE_HOST = ("paged_attention", "confidence drawn")


def main() -> None:
    parser = arguments("Time each Triton kernel on the GPU against its floor.")
    parser.add_argument("--shape", choices=SHAPES, action="append", help="default: all")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--window", type=int, nargs="+", default=[32, 64])
    parser.add_argument("--context", type=int, nargs="+", default=[1024, 4096])
    parser.add_argument("--runs", type=int, default=30)
    parser.add_argument("--no-reference", action="store_true", help="time Triton's alone")
    args = parser.parse_args()
    device = need_cuda()
    clock = Clock(device, args.runs)
    ceilings = clock.ceilings()
    sets = [triton_kernels(), *([] if args.no_reference else [TORCH])]
    table: list[dict[str, Any]] = []
    works = [Work(r, w, c) for r in args.rows for w in args.window for c in args.context]
    try:
        for name in args.shape or SHAPES:
            for work in works:
                torch.manual_seed(0)
                for case in cases(SHAPES[name], work, torch.bfloat16, device):
                    if case.kernel == "rotate_and_store":
                        continue  # it copies the pool first; "in place" is the kernel alone
                    row = {"shape": name, "kernel": case.kernel, **work_row(work)}
                    row |= _timed(case, clock, ceilings, sets)
                    table.append(row)
                    print(_line(row), flush=True)
    finally:
        write_report({"facts": facts(), "ceilings": ceilings, "kernels": table}, args.out)


def work_row(work: Work) -> dict[str, int]:
    """Return a step's size as columns of a report."""
    return {"rows": work.rows, "window": work.window, "context": work.context}


def floor_seconds(moved: float, flops: float, ceilings: dict[str, float]) -> float:
    """Return the least time for so many bytes and operations."""
    return max(moved / ceilings["bytes_per_s"], flops / ceilings["flops_per_s"])


def _timed(
    case: Case, clock: Clock, ceilings: dict[str, float], sets: list[Kernels]
) -> dict[str, Any]:
    """Return the times of a kernel of all sets, and the first one's share of the floor."""
    floor = floor_seconds(case.bytes, case.flops, ceilings)
    row: dict[str, Any] = {"bytes": case.bytes, "flops": case.flops, "floor_us": floor * 1e6}
    for kernels in sets:
        run = partial(case.run, kernels)
        captured = not (kernels.name == "torch" and case.kernel in _ASK_THE_HOST)
        seconds = clock.seconds(graphed(run) if captured else run)
        row |= {f"{kernels.name}_us": seconds * 1e6, f"{kernels.name}_in_graph": captured}
    row["share_of_floor"] = row["floor_us"] / row["triton_us"]
    for rival in case.rivals:
        try:
            row[f"{rival.name}_us"] = clock.seconds(graphed(rival.run)) * 1e6
        except (ImportError, RuntimeError, ValueError) as error:
            row[f"{rival.name}_refused"] = str(error)
    return row


def _line(row: dict[str, Any]) -> str:
    place = f"{row['shape']} {row['rows']}x{row['window']}@{row['context']}"
    rivals = {name: row.get(f"{name}_us") for name in ("torch", "varlen_attn")}
    return (
        f"{row['kernel']:36} {place:32} {row['triton_us']:9.1f} us, floor {row['floor_us']:8.1f}"
        f" ({row['share_of_floor']:4.0%})"
        + "".join(f", {name} {us:9.1f}" for name, us in rivals.items() if us is not None)
    )


if __name__ == "__main__":
    main()
