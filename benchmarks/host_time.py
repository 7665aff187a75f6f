"""Time the host's part of a round: its work while the device is idle, and while the device runs.

    python -m benchmarks.host_time
    python -m benchmarks.host_time --rows 1 32 --cache exact
    python -m benchmarks.host_time --block 4 --steps-per-block 2
    python -m benchmarks.host_time --checkpoint /tmp/sdar-20m --block 4 --threshold 0.9 --steps 8

The model is a toy, so ignore its forward: the rest is the engine's own work, the same for a model
of any size. The forward of a checkpoint, head included, shows that work's share of the time. A
round has three parts. *Before* the forward, the engine admits, plans and lays out windows; *beside*
it are the choice of tokens and the canvases, which a GPU receives while it still runs the forward;
*after* it, the outcome has arrived and becomes updates. Before and after, a GPU is idle. Figures
are CPU time, the mean over all rounds, each of at most --steps steps; what comes between the steps
of one round counts as after. With --recorded the windows fill the tensors of recordings, as with
CUDA graphs, and a function call stands in for a replay. With --threshold requests denoise by SDAR's
rule, which is static if the threshold is 1.
"""

import argparse
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import torch

from benchmarks.gpu.engine import random_engine, run_to_the_end, scripted
from benchmarks.gpu.random_model import random_model
from benchmarks.gpu.shapes import TOY
from diffray.components.checkpoints.checkpoint import load_model
from diffray.components.decoders.threshold import Threshold
from diffray.components.denoiser import Denoiser
from diffray.kernels.choose import TORCH
from diffray.workers.batch_plan import BatchPlan
from diffray.workers.engine import Engine
from diffray.workers.graphs import Graphs, buckets_for
from diffray.workers.messages import Request

BLOCK = 32
PARTS = "before", "beside", "after"

Method = Callable[..., Any]


def host_seconds(
    rows: int,
    cache: str,
    recorded: bool,
    max_tokens: int,
    block: int = BLOCK,
    steps_per_block: int | None = None,
    threshold: float | None = None,
    checkpoint: str | None = None,
    steps: int = 1,
) -> tuple[int, dict[str, float]]:
    """Run `rows` requests together, twice; return the second run's rounds and seconds by part."""
    shape = TOY["toy-grouped" if cache == "exact" else "toy-dense"]
    prompt = 4 * BLOCK
    length = prompt + max_tokens
    if checkpoint is None:
        model = random_model(shape, length, rows * length, torch.device("cpu"), TORCH, "float32")
    else:
        model = load_model(checkpoint, dtype="float32", progress=False)
        shape = shape._replace(vocab=model.spec.vocab_size)
    engine = random_engine(model, max_num_seqs=rows)
    if recorded:
        buckets = buckets_for(rows, block)
        engine.graphs = Graphs(model, engine.kv, engine.slots, buckets, lambda work: work)
    for run in range(2):
        # Blocks end at different steps, as they do under a threshold.
        pace = [max_tokens // block * (steps_per_block or 5 + row % 4) for row in range(rows)]
        requests = [
            scripted(run * rows + row, shape, prompt, max_tokens, pace[row], block, cache)
            for row in range(rows)
        ]
        if threshold is not None:
            decoder = Threshold(threshold=threshold, steps_per_block=steps_per_block)
            requests = [_with(request, decoder) for request in requests]
        with watched() as seconds:
            rounds = len(list(run_to_the_end(engine, requests, steps)))
    return rounds, seconds


def _with(request: Request, decoder: Threshold) -> Request:
    diffusion = request.params.diffusion.model_copy(update={"decoder": decoder})
    params = request.params.model_copy(update={"diffusion": diffusion})
    return replace(request, params=params)


@contextmanager
def watched() -> Iterator[dict[str, float]]:
    """Yield the CPU seconds of each part of the rounds in the `with` block.

    The engine has no code for this: the methods at which parts start and end are wrapped.
    """
    seconds: dict[str, float] = defaultdict(float)
    part, since = "", 0.0

    def enter(following: str) -> None:
        nonlocal part, since
        now = time.thread_time()
        seconds[part] += now - since
        part, since = following, now

    def timed(method: Method, during: str, then: str) -> Method:
        def call(*args: Any, **options: Any) -> Any:
            enter(during)
            try:
                return method(*args, **options)
            finally:
                enter(then)

        return call

    with (
        patch.object(Engine, "step", timed(Engine.step, "before", "")),
        patch.object(BatchPlan, "_hidden", timed(BatchPlan._hidden, "forward", "beside")),
        patch.object(Denoiser, "confidence", timed(Denoiser.confidence, "forward", "beside")),
        patch.object(BatchPlan, "outcomes", timed(BatchPlan.outcomes, "beside", "after")),
    ):
        yield seconds


def main() -> None:
    parser = argparse.ArgumentParser(description="Time the host's part of a round.")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--cache", choices=("exact", "dual", "vicinity", "none"), default="exact")
    parser.add_argument("--max-tokens", type=int, default=256)
    parser.add_argument("--block", type=int, default=BLOCK, help="positions of a block")
    parser.add_argument("--steps-per-block", type=int, help="default: 5 to 8")
    parser.add_argument("--threshold", type=float, help="accept all above it and a step's share")
    parser.add_argument("--steps", type=int, default=1, help="of a round, at most")
    parser.add_argument("--recorded", action="store_true")
    parser.add_argument("--checkpoint", help="its folder; default: a toy")
    args = parser.parse_args()
    torch.set_num_threads(1)
    heads = *PARTS, "idle", "forward"
    print("rows rounds" + "".join(f"{part:>9}" for part in heads) + " ms; a token: rounds  host us")
    for rows in args.rows:
        pace = args.block, args.steps_per_block, args.threshold, args.checkpoint, args.steps
        rounds, seconds = host_seconds(rows, args.cache, args.recorded, args.max_tokens, *pace)
        ms = [seconds[part] / rounds * 1e3 for part in (*PARTS, "forward")]
        ms.insert(3, ms[0] + ms[2])
        tokens = rows * args.max_tokens
        host = sum(seconds[part] for part in PARTS) / tokens * 1e6
        cells = "".join(f"{x:9.3f}" for x in ms)
        print(f"{rows:4} {rounds:6}{cells} {rounds / tokens:18.3f} {host:8.0f}")


if __name__ == "__main__":
    main()
