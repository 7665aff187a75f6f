"""Time a full denoising step on the GPU, against the bytes that it must read.

    python -m benchmarks.gpu.step_time
    python -m benchmarks.gpu.step_time --shape llada-moe-7b-a1b --rows 1 --window 64 --context 1024
    python -m benchmarks.gpu.step_time --experts int8 --out int8.json
    python -m benchmarks.gpu.step_time --engine

The step runs from token ids to a choice for every position of the windows, with random weights, in
a CUDA graph and without. Left out: planning, acceptance, sampling's filters; `--engine` times them
too, as rounds of one step of the engine that serves, in the middle of a block. The roofline is the
larger of bytes over measured copy bandwidth and operations over a measured bfloat16 product; the
tokens per second are the step's time at the given tokens per forward, nothing more.
"""

import argparse
from typing import Any

import torch

from benchmarks.gpu.cases import Work
from benchmarks.gpu.measure import Clock, arguments, facts, graphed, need_cuda, write_report
from benchmarks.gpu.model import random_model
from benchmarks.gpu.shapes import SHAPES, Shape
from benchmarks.gpu.step import bytes_read, flops, make_step
from benchmarks.gpu.time_kernels import floor_seconds, work_row
from diffray.kernels.choose import Kernels, triton_kernels

EXPERTS = {"bfloat16": None, "int8": torch.int8, "float8": torch.float8_e4m3fn}


def main() -> None:
    args = _parser().parse_args()
    device = need_cuda()
    clock = Clock(device, args.runs)
    ceilings = clock.ceilings()
    kernels = triton_kernels()
    table: list[dict[str, Any]] = []
    works = [Work(r, w, c) for r in args.rows for w in args.window for c in args.context]
    try:
        for name in args.shape or SHAPES:
            for work in works:
                torch.cuda.empty_cache()
                row = {"shape": name, "experts": args.experts, **work_row(work)}
                experts = EXPERTS[args.experts]
                row |= _timed(name, work, experts, kernels, clock, ceilings, args.accepted)
                table.append(row)
                if args.engine:
                    print(_line(row), flush=True)  # in case the engine cannot be run
                    row |= timed_engine(SHAPES[name], work, kernels, device, "bfloat16")
                print(_line(row), flush=True)
    finally:
        write_report({"facts": facts(), "ceilings": ceilings, "steps": table}, args.out)


def _parser() -> argparse.ArgumentParser:
    parser = arguments("Time a full denoising step on the GPU.")
    parser.add_argument("--shape", choices=SHAPES, action="append", help="default: all")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--window", type=int, nargs="+", default=[32, 64])
    parser.add_argument("--context", type=int, nargs="+", default=[512, 1024, 2048, 4096])
    parser.add_argument("--experts", choices=EXPERTS, default="bfloat16")
    parser.add_argument("--accepted", type=float, nargs="+", default=[3.87, 5.67])
    parser.add_argument("--runs", type=int, default=30)
    parser.add_argument("--engine", action="store_true", help="time the engine's rounds as well")
    return parser


def _timed(
    name: str,
    work: Work,
    experts: torch.dtype | None,
    kernels: Kernels,
    clock: Clock,
    ceilings: dict[str, float],
    accepted: list[float],
) -> dict[str, Any]:
    """Return a step's times, with the share of the roofline, and the peak of memory."""
    torch.manual_seed(0)
    torch.cuda.reset_peak_memory_stats()
    device = torch.device("cuda", torch.cuda.current_device())
    shape = SHAPES[name]
    step = make_step(shape, work, "bfloat16", device, kernels, experts)
    eager_s = clock.seconds(step.run)
    graph_s = clock.seconds(graphed(step.run))
    read, computed = bytes_read(step.model, shape, work), flops(step.model, shape, work)
    floor_s = floor_seconds(read, computed, ceilings)
    return {
        "graph_ms": graph_s * 1e3,
        "eager_ms": eager_s * 1e3,
        "floor_ms": floor_s * 1e3,
        "share_of_roofline": floor_s / graph_s,
        "bytes": read,
        "flops": computed,
        "peak_memory_gib": torch.cuda.max_memory_allocated() / 2**30,
        "tokens_per_s": {str(rate): rate * work.rows / graph_s for rate in accepted},
    }


def timed_engine(
    shape: Shape,
    work: Work,
    kernels: Kernels,
    device: torch.device,
    dtype: str,
) -> dict[str, float]:
    """Return the median of the engine's rounds, of one step and one token each, inside a block."""
    # The engine needs more than torch.
    from benchmarks.gpu.engine import random_engine, run_to_the_end, scripted

    window = min(work.window, work.context)
    model = random_model(shape, work.context + window, dtype, device, kernels)
    engine = random_engine(model, max_num_seqs=work.rows, graph_block_length=window)
    cache = "exact" if model.spec.block_causal else "dual"
    start = (work.context - window) // window * window
    requests = [
        scripted(row, shape, start, window, window, window, cache) for row in range(work.rows)
    ]
    seconds = list(run_to_the_end(engine, requests))[2:-1]
    return {"engine_ms": sorted(seconds)[len(seconds) // 2] * 1e3}


def _line(row: dict[str, Any]) -> str:
    place = f"{row['shape']} {row['experts']} {row['rows']}x{row['window']}@{row['context']}"
    engine = f", {row['engine_ms']:7.2f} in the engine" if "engine_ms" in row else ""
    rates = ", ".join(f"{value:.0f} tok/s at {rate}" for rate, value in row["tokens_per_s"].items())
    return (
        f"{place:44} {row['graph_ms']:7.2f} ms in a graph, {row['eager_ms']:7.2f} without{engine}, "
        f"floor {row['floor_ms']:6.2f} ({row['share_of_roofline']:4.0%}); {rates}"
    )


if __name__ == "__main__":
    main()
