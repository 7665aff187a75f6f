"""Time whole generations with a scripted acceptance, through the serving engine.

    python -m benchmarks.gpu.generate
    python -m benchmarks.gpu.generate --shape llada-moe-7b-a1b --rows 1 8 32 --out generate.json
    python -m benchmarks.gpu.generate --shape llada-moe-7b-a1b --cache dual vicinity
    python -m benchmarks.gpu.generate --rate 1 --prompt 960 --tokens 64  # inside a block
    python -m benchmarks.gpu.generate --device cpu --shape toy-moe --tokens 32 --block 8

Weights are random, so the tokens mean nothing; how many become final in a step is scripted: 3.87
and 5.67 tokens per forward are what dInfer reports for LLaDA-MoE without and with trajectory
distillation. Everything else is as in serving, and the prompt's time counts. Tokens per second are
of all rows; forwards are the model's. `host_ms` has the host's part of a round, which is the same
for a model of any size, so a toy on a CPU shows it too. There a function call stands for a graph.
"""

import argparse
import time
from collections.abc import Callable
from functools import partial
from itertools import product

import torch

from benchmarks.gpu.engine import (
    HOST_PARTS,
    experts_met,
    host_seconds,
    random_engine,
    replays,
    run_to_the_end,
    scripted,
)
from benchmarks.gpu.floor import Text
from benchmarks.gpu.measure import ceilings
from benchmarks.gpu.program import CACHES, Row, arguments, run
from benchmarks.gpu.random_model import WEIGHTS, random_model
from benchmarks.gpu.shapes import ALL, SHAPES
from diffray.kernels.choose import OPTIONS, choose_kernels
from diffray.workers.engine import Engine
from diffray.workers.graphs import Graphs, buckets_for, run_again
from diffray.workers.messages import Request


def main() -> None:
    run(plan, parser().parse_args(), _line)


def parser() -> argparse.ArgumentParser:
    parser = arguments("Time whole generations with a scripted acceptance.")
    parser.add_argument("--shape", choices=ALL, nargs="+", default=[*SHAPES])
    parser.add_argument("--rows", type=int, nargs="+", default=[1])
    parser.add_argument("--rate", type=float, nargs="+", default=[3.87, 5.67], help="tokens a step")
    parser.add_argument("--prompt", type=int, default=128)
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--block", type=int, default=64)
    parser.add_argument(
        "--cache", choices=CACHES, nargs="+", default=["dual"], help="of bidirectional attention"
    )
    parser.add_argument("--decoder", choices=("fixed", "credit"), nargs="+", default=["fixed"])
    parser.add_argument("--steps-per-round", type=int, default=1)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--kernels", choices=OPTIONS, default="auto")
    parser.add_argument("--weights", choices=WEIGHTS, nargs="+", default=["bfloat16"])
    parser.add_argument("--no-graphs", action="store_true", help="launch every kernel by itself")
    return parser


def plan(args: argparse.Namespace) -> dict[str, Callable[[], Row]]:
    """Return a generation for each model, size, rate, cache and decoder."""
    found: dict[str, Callable[[], Row]] = {}
    sizes = args.shape, args.weights, args.rows, args.rate, args.cache, args.decoder
    for shape, weights, rows, rate, cache, decoder in product(*sizes):
        row: Row = {"shape": shape, "weights": weights, "rows": rows, "rate": rate}
        row |= {"cache": "exact" if ALL[shape].block else cache, "decoder": decoder}
        found[" ".join(map(str, row.values()))] = partial(timed, row, args)
    return found


def timed(row: Row, args: argparse.Namespace) -> Row:
    """Return the median of several runs after a warm-up and, on a GPU, its share of the floor's."""
    shape, rows, device = ALL[row["shape"]], row["rows"], torch.device(args.device)
    torch.manual_seed(0)
    length = args.prompt + args.tokens + 2 * args.block
    graphs = {"cuda_graphs": False} if args.no_graphs else {}
    kernels = choose_kernels(args.kernels, device, getattr(torch, args.dtype))
    how = device, kernels, args.dtype, row["weights"]
    model = random_model(shape, length, rows * length, *how)
    engine = random_engine(model, max_num_seqs=rows, graph_block_length=args.block, **graphs)
    if args.device == "cpu" and not args.no_graphs:
        buckets = buckets_for(rows, args.block)
        engine.graphs = Graphs(engine.model, engine.kv, engine.slots, buckets, run_again)
    steps = round(args.tokens / row["rate"])
    script = shape, args.prompt, args.tokens, steps, args.block, row["cache"]
    requests = [scripted(uid, *script) for uid in range(rows)]
    pace = args.steps_per_round, row["decoder"]
    every = [_run(engine, requests, *pace) for _ in range(args.runs + 1)][1:]
    median = sorted(every, key=lambda each: each["seconds"])[len(every) // 2]
    found = {
        **row,
        **experts_met(engine, requests, *pace),
        "steps_per_round": args.steps_per_round,
        "graphs": engine.graphs is not None,
        **median,
        "tokens_per_s": median["tokens"] / median["seconds"],
        "tokens_per_forward": median["tokens"] / median["forwards"] / rows,
        "forwards_per_s": median["forwards"] / median["seconds"],
    }
    if args.device == "cuda":
        found["peak_memory_gib"] = torch.cuda.max_memory_allocated() / 2**30
        sizes = row["weights"], args.prompt, args.tokens, args.block
        floor_s = Text(rows, row["rate"], row["cache"], *sizes).seconds(shape, ceilings())
        found |= {"floor_s": floor_s, "share_of_floor": floor_s / found["seconds"]}
    return found


def _run(engine: Engine, requests: list[Request], steps: int, decoder: str) -> Row:
    forwards, tokens, begin = engine.forwards, engine.tokens, time.perf_counter()
    with replays() as replayed, host_seconds() as host:
        rounds = sorted(run_to_the_end(engine, requests, steps, decoder))
    return {
        "seconds": time.perf_counter() - begin,
        "tokens": engine.tokens - tokens,
        "forwards": engine.forwards - forwards,
        "replays": len(replayed),
        "median_round_ms": rounds[len(rounds) // 2] * 1e3,
        "host_ms": {part: host[part] / len(rounds) * 1e3 for part in HOST_PARTS},
    }


def _line(row: Row) -> str:
    experts = f", {row['distinct_experts']:.1f} experts" if "distinct_experts" in row else ""
    share = f" ({row['share_of_floor']:.0%} of the floor's)" if "floor_s" in row else ""
    before, beside, after = row["host_ms"].values()
    return (
        f"{row['tokens_per_s']:8.0f} tokens/s{share},"
        f" {row['replays']} of {row['forwards']} forwards replayed,"
        f" {row['tokens_per_forward']:5.2f} tokens per forward, {row['forwards_per_s']:6.1f}"
        f" forwards/s, {row['median_round_ms']:.2f} ms a round{experts}; the host's part"
        f" {before + after:.2f} while the device is idle, {beside:.2f} beside it"
    )


if __name__ == "__main__":
    main()
