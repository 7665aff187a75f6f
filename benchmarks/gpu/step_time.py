"""Time a full denoising step on the GPU, against the bytes that it must read.

    python -m benchmarks.gpu.step_time
    python -m benchmarks.gpu.step_time --shape llada-moe-7b-a1b --rows 1 --window 64 --context 1024
    python -m benchmarks.gpu.step_time --part step kernels

The step runs from token ids to a choice for every position of the windows, with random weights, in
a CUDA graph and without; nothing is planned or accepted, so that all shapes are static. The part
`kernels` lists every kernel of one replay. `floor.py` says what the floor is. What the step leaves
out, `generate` measures: rounds of the serving engine.
"""

import argparse
from collections.abc import Callable
from functools import partial
from itertools import product
from typing import Final, NamedTuple

import torch
from torch import Tensor

from benchmarks.gpu import floor
from benchmarks.gpu.cases import PAGE_SIZE, last_windows
from benchmarks.gpu.measure import ceilings, graphed, kernel_table, median_s
from benchmarks.gpu.program import Row, arguments, run
from benchmarks.gpu.random_model import WEIGHTS, counted_experts, random_model
from benchmarks.gpu.shapes import ALL, SHAPES, Shape, Work
from diffray.components.batch import Batch
from diffray.components.denoiser import Denoiser
from diffray.components.kv_pool import KVPool
from diffray.kernels.choose import Kernels, triton_kernels
from diffray.kernels.confidence import Confidence


def main() -> None:
    parser = arguments("Time a full denoising step on the GPU.")
    parser.add_argument("--shape", choices=SHAPES, nargs="+", default=[*SHAPES])
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--window", type=int, nargs="+", default=[32, 64])
    parser.add_argument("--context", type=int, nargs="+", default=[512, 1024, 2048, 4096])
    parser.add_argument("--weights", choices=WEIGHTS, nargs="+", default=["bfloat16"])
    parser.add_argument("--part", choices=PARTS, nargs="+", default=["step"])
    parser.add_argument("--runs", type=int, default=30)
    run(plan, parser.parse_args(), _line)


def plan(args: argparse.Namespace) -> dict[str, Callable[[], Row]]:
    """Return a timing for each part, model, kind of weights and size."""
    found: dict[str, Callable[[], Row]] = {}
    sizes = args.shape, args.weights, args.rows, args.window, args.context
    for part, shape, weights, *size in product(args.part, *sizes):
        work = Work(*size)
        row: Row = {"part": part, "shape": shape, "weights": weights, **work._asdict()}
        found[f"{part} {shape} {weights} {work}"] = partial(PARTS[part], row, work, args.runs)
    return found


class Step(NamedTuple):
    """A model, its K/V pool, and the windows that it runs."""

    model: Denoiser
    kv: KVPool
    batch: Batch
    ids_T: Tensor

    def run(self) -> Confidence:
        """Run all layers on all windows and choose a token for each position."""
        hidden_TH = self.model.forward(self.model.embed(self.ids_T), self.batch, self.kv)
        return self.model.confidence(hidden_TH, self.model.spec.vocab_size - 1, None)


def make_step(
    shape: Shape,
    work: Work,
    device: torch.device,
    kernels: Kernels,
    dtype: str = "bfloat16",
    weights: str = "bfloat16",
) -> Step:
    """Make a model of random weights and a pool of random K/V."""
    model = random_model(shape, work.context, work.tokens, device, kernels, dtype, weights)
    batch, num_pages = last_windows(shape, work, device)
    kv = KVPool(
        shapes=model.spec.kv_shapes,
        num_pages=num_pages,
        page_size=PAGE_SIZE,
        dtype=model.dtype,
        device=device,
        kernels=kernels,
    )
    kv.keys_LSGD.normal_()
    kv.values_LSGD.normal_()
    ids_T = torch.randint(0, shape.vocab - 1, (work.tokens,), device=device)
    return Step(model, kv, batch, ids_T)


def _step(row: Row, work: Work) -> Step:
    torch.manual_seed(0)
    how = torch.device("cuda"), triton_kernels(), "bfloat16", row["weights"]
    return make_step(ALL[row["shape"]], work, *how)


def timed(row: Row, work: Work, runs: int) -> Row:
    """Return a step's times, its share of the roofline, and the peak memory."""
    step = _step(row, work)
    with counted_experts(step.model) as met:
        step.run()
    eager_s, graph_s = median_s(step.run, runs), median_s(graphed(step.run), runs)
    found = ceilings()
    floor_ms = floor.step_ms(ALL[row["shape"]], work, row["weights"], found)
    return {
        **row,
        **met,
        "graph_ms": graph_s * 1e3,
        "eager_ms": eager_s * 1e3,
        "per_s": 1 / graph_s,
        "floor_ms": floor_ms,
        "share_of_floor": floor_ms / graph_s / 1e3,
        **found._asdict(),
        "peak_memory_gib": torch.cuda.max_memory_allocated() / 2**30,
    }


def profiled(row: Row, work: Work, _runs: int) -> Row:
    """Return every kernel of one replay of a step."""
    return row | kernel_table(graphed(_step(row, work).run))


PARTS: Final = {"step": timed, "kernels": profiled}


def _line(row: Row) -> str:
    met = f", {row['distinct_experts']:.1f} experts met" if "distinct_experts" in row else ""
    if row["part"] == "kernels":
        most = "; ".join(f"{k['kernel'][:40]} {k['us']:.0f}" for k in row["kernels"][:4])
        return f"{row['busy_us']:.0f} of {row['span_us']:.0f} us in kernels: {most}"
    return (
        f"{row['graph_ms']:7.2f} ms in a graph, {row['eager_ms']:.2f} without,"
        f" floor {row['floor_ms']:.2f} ({row['share_of_floor']:.0%}){met}"
    )


if __name__ == "__main__":
    main()
