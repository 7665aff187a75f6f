"""Measures weight formats on this processor: tokens/s compared with float32, and memory.

    python -m benchmarks.random_checkpoint /tmp/llada-100m
    python -m benchmarks.quantized /tmp/llada-100m
    python -m benchmarks.quantized --threads 1 --cpu-time --formats int8 int4 -- /tmp/llada-100m

One request runs in blocks of 32, with windows of a block (`dual`). One position becomes final per
step, or several with fewer `--steps`, which takes less time at the same ratios. The processor's
vector units are printed first: w8a8 needs VNNI or AMX to be faster than float32.
"""

import argparse
from contextlib import ExitStack
from typing import Any

import torch

from benchmarks import paired
from diffray import DiffusionLLM, SamplingParams
from diffray.cluster.cli.bench.datasets import random_ids
from diffray.components.checkpoints.info import describe

TOKENS = 32
UNITS = ("avx2", "avx512_f", "avx_vnni", "avx512_vnni", "amx_int8", "avx512_bf16", "amx_bf16")


def main() -> None:
    parser = paired.parser(__doc__, turns=3)
    parser.add_argument("checkpoints", nargs="+")
    parser.add_argument("--formats", nargs="+", default=["w8a8", "int8", "int4", "fp8"])
    parser.add_argument("--steps", type=int, default=TOKENS, help="of a block")
    args = parser.parse_args()
    clock = paired.clock_of(args)
    known = torch.cpu.get_capabilities()
    found = [name for name in UNITS if known.get(name)]
    print(f"{known.get('cpu_name', 'CPU')}: {', '.join(found)}; {clock.label}\n")
    print(paired.head("checkpoint", "weights", "MB", "tokens/s", "times float32"))
    for checkpoint in args.checkpoints:
        kinds: list[tuple[str, str, str | None]] = [("float32", "float32", None)]
        if known.get("amx_bf16") or known.get("avx512_bf16"):
            kinds.append(("bfloat16", "bfloat16", None))
        kinds += [(name, "float32", name) for name in args.formats]
        for cells in compare(checkpoint, kinds, args, clock):
            print(paired.row(checkpoint, *cells), flush=True)


def compare(
    checkpoint: str,
    kinds: list[tuple[str, str, str | None]],
    args: argparse.Namespace,
    clock: paired.Clock,
) -> list[tuple[object, ...]]:
    """Return a row's cells for each kind of weights; all take turns in this process."""
    policy: dict[str, Any] = {
        "block_length": TOKENS,
        "decoder": {"kind": "fixed", "steps": args.steps},
        "cache": {"kind": "dual"},
    }
    params = SamplingParams(max_tokens=TOKENS, ignore_eos=True, diffusion=policy)
    contenders = {}
    with ExitStack() as stack:
        for name, dtype, quantization in kinds:
            llm = stack.enter_context(
                DiffusionLLM(checkpoint, dtype=dtype, quantization=quantization, max_num_seqs=1)
            )
            prompts = random_ids(llm, 1, TOKENS, args.seed)
            contenders[name] = clock.timed(
                lambda _, llm=llm, prompts=prompts: paired.generate(llm, prompts, [params])  # type: ignore[misc]
            )
        turns = paired.take_turns(contenders, args.repeats)
    rows: list[tuple[object, ...]] = []
    for name, dtype, quantization in kinds:
        size = describe(checkpoint, quantization).bytes_in_memory[dtype]
        ratio = paired.speedup(turns[name], turns["float32"])
        rows.append((name, f"{size / 1e6:.0f}", paired.rate(turns[name]), ratio))
    return rows


if __name__ == "__main__":
    main()
