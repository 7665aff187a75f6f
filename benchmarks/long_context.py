"""Measures long prompts: seconds, forwards and memory from the prompt to the first tokens.

    python -m benchmarks.long_context --threads 1 --cpu-time

The model is a small random LLaDA2 whose config allows 128k positions. Each length runs in its own
process, so that its peak memory is its own too.
"""

import argparse
import json
import multiprocessing
import resource
import tempfile
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors.torch import save_file

from benchmarks import paired
from benchmarks.random_checkpoint import Shape, config_of, draw_weights
from diffray import DiffusionLLM
from diffray.components.kv_pool import position_bytes

SHAPE = Shape(hidden=128, layers=4, heads=4, kv_heads=2, mlp=256, vocab=1000, expert_mlp=64)
LONGEST = 131072
ANSWER = 32


class Found(NamedTuple):
    """What one prompt took."""

    seconds: float
    forwards: int
    grown: int  # bytes by which the peak memory exceeds that before the prompt
    kv: int  # bytes of its K/V


def write_checkpoint(folder: Path) -> None:
    config = config_of("llada2_moe", SHAPE) | {"max_position_embeddings": LONGEST}
    torch.manual_seed(0)
    weights = draw_weights(config, lambda _, shape: torch.randn(shape) / shape[-1] ** 0.5)
    save_file(weights, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))


def peak() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10


def measure(folder: str, length: int, chunk: int, args: argparse.Namespace) -> Found:
    """Answer one prompt of `length` tokens."""
    clock = paired.clock_of(args)
    prompt = torch.randint(0, SHAPE.vocab - 10, (length,)).tolist()
    with DiffusionLLM(folder, dtype="float32", max_num_seqs=1, chunk=chunk) as llm:
        llm.generate(prompt[:100], max_tokens=ANSWER, ignore_eos=True, use_tqdm=False)
        before, begin = peak(), clock.read()
        (output,) = llm.generate(prompt, max_tokens=ANSWER, ignore_eos=True, use_tqdm=False)
        seconds, grown = clock.read() - begin, peak() - before
        spec = llm.limits.spec
        kept = position_bytes(spec.kv_shapes, torch.float32, None) * length
        return Found(seconds, output.outputs[0].forwards, grown, kept)


def main() -> None:
    parser = paired.parser(__doc__, turns=1)
    parser.add_argument("--lengths", type=int, nargs="+", default=[2048, 8192, 32768, 131000])
    parser.add_argument("--chunk", type=int, default=512)
    args = parser.parse_args()
    print(paired.clock_of(args).label)
    print(paired.head("prompt", "s", "forwards", "memory, MB", "K/V of it, MB", "ms per 1k tokens"))
    with tempfile.TemporaryDirectory() as folder:
        write_checkpoint(Path(folder))
        context = multiprocessing.get_context("spawn")
        for length in args.lengths:
            with context.Pool(1) as pool:
                found = pool.apply(measure, (folder, length, args.chunk, args))
            megabytes = [f"{each / 1e6:.0f}" for each in (found.grown, found.kv)]
            pace = f"{1e6 * found.seconds / length:.0f}"
            cells = f"{found.seconds:.1f}", found.forwards, *megabytes, pace
            print(paired.row(length, *cells), flush=True)


if __name__ == "__main__":
    main()
