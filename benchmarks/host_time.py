"""Time what the host does while nothing runs on the device: from a round's end to the next forward.

    python -m benchmarks.host_time
    python -m benchmarks.host_time --rows 1 32 --cache exact

The model is a toy, and its forward is not counted: what is left is the engine's own work, the same
for a model of any size. A round is cut in three. *Before* the forward it admits, plans and lays
out windows; *beside* it are the choice of tokens and the canvases, which a GPU is given while it
still runs the forward; *after* it the outcome has arrived, and becomes news. Before and after, a
GPU has nothing to do. Figures are processor time, the mean over all rounds of one step. With
--recorded the windows fill the tensors of recordings, as with CUDA graphs; a stand-in replays.
"""

import argparse
import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any, Self
from unittest.mock import patch

import torch

from benchmarks.gpu.engine import random_engine, run_to_the_end, scripted
from benchmarks.gpu.random_model import random_model
from benchmarks.gpu.shapes import TOY
from diffray.kernels.choose import TORCH
from diffray.workers.batch_plan import BatchPlan
from diffray.workers.engine import Engine
from diffray.workers.graphs import Graphs, buckets_for

_BLOCK = 32
_PARTS = "before", "beside", "after"


def main() -> None:
    args = _parser().parse_args()
    torch.set_num_threads(1)
    print("rows rounds" + "".join(f"{part:>9}" for part in (*_PARTS, "idle")) + " ms")
    for rows in args.rows:
        rounds, seconds = host_seconds(rows, args.cache, args.recorded, args.max_tokens)
        ms = [seconds[part] / rounds * 1e3 for part in _PARTS]
        print(f"{rows:4} {rounds:6}" + "".join(f"{x:9.3f}" for x in (*ms, ms[0] + ms[2])))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description="Time the host's part of a round.")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--cache", choices=("exact", "dual", "vicinity", "none"), default="exact")
    parser.add_argument("--max-tokens", type=int, default=256)
    parser.add_argument("--recorded", action="store_true")
    return parser


def host_seconds(
    rows: int, cache: str, recorded: bool, max_tokens: int
) -> tuple[int, dict[str, float]]:
    """Run so many requests at once, twice; return the second time's rounds and seconds by part."""
    shape = TOY["toy-grouped" if cache == "exact" else "toy-dense"]
    prompt = 4 * _BLOCK
    length = prompt + max_tokens
    model = random_model(shape, length, rows * length, torch.device("cpu"), TORCH, "float32")
    engine = random_engine(model, max_num_seqs=rows)
    if recorded:
        buckets = buckets_for(rows, _BLOCK)
        engine.graphs = Graphs(model, engine.kv, engine.slots, buckets, _again)
    rounds = 0
    for number in range(2):
        watch = Watch()
        # Blocks end at different steps, as they do under a threshold.
        steps = [max_tokens // _BLOCK * (5 + row % 4) for row in range(rows)]
        requests = [
            scripted(number * rows + row, shape, prompt, max_tokens, steps[row], _BLOCK, cache)
            for row in range(rows)
        ]
        with watch:
            rounds = len(list(run_to_the_end(engine, requests)))
    return rounds, watch.seconds


class Watch:
    """Where an engine's processor time goes, told by the moments at which rounds touch the device.

    The engine has no code for it: its methods are wrapped from outside.
    """

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self._part, self._since = "", 0.0
        self._patches: list[Any] = []

    def _enter(self, part: str) -> None:
        now = time.thread_time()
        self.seconds[self._part] += now - self._since
        self._part, self._since = part, now

    def __enter__(self) -> Self:
        for owner, name, during, then in (
            (Engine, "step", "before", ""),
            (BatchPlan, "_hidden", "forward", "beside"),
            (BatchPlan, "outcomes", "beside", "after"),
        ):
            wrapped = self._wrapped(getattr(owner, name), during, then)
            self._patches.append(patch.object(owner, name, wrapped))
        for each in self._patches:
            each.start()
        return self

    def __exit__(self, *_: object) -> None:
        for each in self._patches:
            each.stop()

    def _wrapped(self, method: Callable[..., Any], during: str, then: str) -> Callable[..., Any]:
        def watched(*args: Any, **options: Any) -> Any:
            self._enter(during)
            try:
                return method(*args, **options)
            finally:
                self._enter(then)

        return watched


def _again(work: Callable[[], Any]) -> Callable[[], Any]:
    return work


if __name__ == "__main__":
    main()
