"""Time whole generations with a scripted acceptance, through the engine that serves.

    python -m benchmarks.gpu.generate
    python -m benchmarks.gpu.generate --shape llada-moe-7b-a1b --rows 1 8 32 --out generate.json
    python -m benchmarks.gpu.generate --shape llada-moe-7b-a1b --quantization experts_int8
    python -m benchmarks.gpu.generate --device cpu --shape toy-moe --tokens 32 --block 8

Weights are random, so the tokens mean nothing; how many become final in a step is scripted: 3.87
and 5.67 tokens per forward are what dInfer reports for LLaDA-MoE without and with trajectory
distillation. Everything else is as in serving: planning, cache refreshes, acceptance, the report
of tokens, and the prompt's time. Tokens per second count all rows; forwards are the model's.
"""

import argparse
import time
from typing import Any

import torch

from benchmarks.gpu.engine import random_engine, run_to_the_end, scripted
from benchmarks.gpu.measure import arguments, facts, need_cuda, write_report
from benchmarks.gpu.model import random_model
from benchmarks.gpu.shapes import SHAPES, TOY
from diffray.components.backend import QUANTIZED, choose_quantization
from diffray.components.denoiser import Denoiser
from diffray.kernels.choose import WISHES, choose_kernels

ALL = SHAPES | TOY


def main() -> None:
    args = _parser().parse_args()
    device = torch.device(args.device) if args.device == "cpu" else need_cuda()
    dtype = getattr(torch, args.dtype)
    kernels = choose_kernels(args.kernels, device, dtype)
    table: list[dict[str, Any]] = []
    try:
        for name in args.shape or SHAPES:
            torch.manual_seed(0)
            length = args.prompt + args.tokens + 2 * args.block
            model = random_model(ALL[name], length, args.dtype, device, kernels)
            quantized = choose_quantization(args.quantization, device)
            if quantized is not None:
                model.quantize(quantized)
            for rows in args.rows:
                for rate in args.accepted:
                    table.append({"shape": name, **_timed(model, name, rows, rate, args)})
                    print(_line(table[-1]), flush=True)
            del model
            if device.type == "cuda":
                torch.cuda.empty_cache()
    finally:
        write_report({"facts": facts(), "kernels": kernels.name, "generations": table}, args.out)


def _parser() -> argparse.ArgumentParser:
    parser = arguments("Time whole generations with a scripted acceptance.")
    parser.add_argument("--shape", choices=ALL, action="append", help="default: the published")
    parser.add_argument("--rows", type=int, nargs="+", default=[1])
    parser.add_argument("--accepted", type=float, nargs="+", default=[3.87, 5.67])
    parser.add_argument("--prompt", type=int, default=128)
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--block", type=int, default=64)
    parser.add_argument("--cache", default="dual", help="of models whose attention goes both ways")
    parser.add_argument("--steps-per-round", type=int, default=1)
    parser.add_argument("--page-size", type=int, default=16)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--kernels", choices=WISHES, default="auto")
    parser.add_argument("--quantization", choices=QUANTIZED, help="of routed experts")
    parser.add_argument("--no-graphs", action="store_true", help="launch every kernel by itself")
    return parser


def _timed(
    model: Denoiser, name: str, rows: int, rate: float, args: argparse.Namespace
) -> dict[str, Any]:
    """Return the fastest of some runs, after one that warms up; the memory is the peak of all."""
    on_gpu = model.device.type == "cuda"
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
    engine = random_engine(
        model,
        max_num_seqs=rows,
        page_size=args.page_size,
        cuda_graphs=False if args.no_graphs else None,
        graph_block_length=args.block,
    )
    steps = round(args.tokens / rate)
    cache = "exact" if model.spec.block_causal else args.cache
    best: dict[str, Any] = {"seconds": float("inf")}
    for run in range(args.runs + 1):
        requests = [
            scripted(row, ALL[name], args.prompt, args.tokens, steps, args.block, cache)
            for row in range(rows)
        ]
        forwards, tokens = engine.forwards, engine.tokens
        begin = time.perf_counter()
        rounds = list(run_to_the_end(engine, requests, args.steps_per_round))
        seconds = time.perf_counter() - begin
        if run and seconds < best["seconds"]:
            best = {
                "seconds": seconds,
                "tokens": engine.tokens - tokens,
                "forwards": engine.forwards - forwards,
                "median_round_ms": sorted(rounds)[len(rounds) // 2] * 1e3,
            }
    return {
        "rows": rows,
        "asked_rate": rate,
        "cache": cache,
        "graphs": engine.graphs is not None,
        **best,
        "tokens_per_s": best["tokens"] / best["seconds"],
        "tokens_per_forward": best["tokens"] / best["forwards"] / rows,
        "forwards_per_s": best["forwards"] / best["seconds"],
        "peak_memory_gib": torch.cuda.max_memory_allocated() / 2**30 if on_gpu else None,
    }


def _line(row: dict[str, Any]) -> str:
    graphs = "on" if row["graphs"] else "off"
    place = f"{row['shape']} x{row['rows']} {row['cache']}, graphs {graphs}"
    return (
        f"{place:48} {row['tokens_per_s']:8.0f} tokens/s, {row['tokens_per_forward']:5.2f} tokens"
        f" per forward, {row['forwards_per_s']:6.1f} forwards/s,"
        f" {row['median_round_ms']:.2f} ms a round"
    )


if __name__ == "__main__":
    main()
