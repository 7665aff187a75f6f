"""Time the host's part of a round: its work while the device is idle, and while the device runs.

    python -m benchmarks.host_time
    python -m benchmarks.host_time --rows 1 32 --cache dual
    python -m benchmarks.host_time --block 4
    python -m benchmarks.host_time --recorded

The model is a toy, so ignore its forward: the rest is the engine's own work, the same for a model
of any size. A round has three parts. *Before* the forward, the engine admits, plans and lays out
windows; *beside* it are the choice of tokens and the canvases, which a GPU receives while it still
runs the forward; *after* it, the outcome has arrived and becomes updates. Before and after, a GPU
is idle. Figures are CPU time, the mean over all rounds. With --recorded the windows fill the
tensors of recordings, as with CUDA graphs, and a function call stands in for a replay.
"""

import argparse
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch

from benchmarks.gpu.engine import random_engine, run_to_the_end, scripted
from benchmarks.gpu.random_model import random_model
from benchmarks.gpu.shapes import TOY
from diffray.components.denoiser import Denoiser
from diffray.kernels.choose import TORCH
from diffray.workers.batch_plan import BatchPlan
from diffray.workers.engine import Engine
from diffray.workers.graphs import Graphs, buckets_for

BLOCK, PROMPT = 32, 128
PARTS = "before", "beside", "after"

Method = Callable[..., Any]


def host_seconds(
    rows: int, cache: str, recorded: bool, max_tokens: int, block: int = BLOCK
) -> tuple[int, dict[str, float]]:
    """Run `rows` requests together, twice; return the second run's rounds and seconds by part."""
    shape = TOY["toy-grouped" if cache == "exact" else "toy-dense"]
    length = PROMPT + max_tokens
    model = random_model(shape, length, rows * length, torch.device("cpu"), TORCH, "float32")
    engine = random_engine(model, max_num_seqs=rows)
    if recorded:
        buckets = buckets_for(rows, block)
        engine.graphs = Graphs(model, engine.kv, engine.slots, buckets, lambda work: work)
    for run in range(2):
        # Blocks end at different steps, as they do under a threshold.
        steps = [max_tokens // block * (5 + row % 4) for row in range(rows)]
        requests = [
            scripted(run * rows + row, shape, PROMPT, max_tokens, steps[row], block, cache)
            for row in range(rows)
        ]
        with watched() as seconds:
            rounds = len(list(run_to_the_end(engine, requests)))
    return rounds, seconds


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
    parser.add_argument("--recorded", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(1)
    heads = "".join(f"{part:>9}" for part in (*PARTS, "idle", "forward"))
    print(f"rows rounds{heads} ms, host us a token")
    for rows in args.rows:
        rounds, s = host_seconds(rows, args.cache, args.recorded, args.max_tokens, args.block)
        cells = *(s[part] for part in PARTS), s["before"] + s["after"], s["forward"]
        a_token = sum(s[part] for part in PARTS) / rows / args.max_tokens * 1e6
        line = "".join(f"{cell / rounds * 1e3:9.3f}" for cell in cells)
        print(f"{rows:4} {rounds:6}{line} {a_token:20.0f}")


if __name__ == "__main__":
    main()
