"""Measures what LoRA adapters cost: the same batch with none, and spread over several of them.

    python -m benchmarks.random_checkpoint /tmp/llada-100m
    python -m benchmarks.lora --threads 1 --cpu-time /tmp/llada-100m

The adapters are random, for all linear layers of attention and MLPs; every answer fills its canvas.
"""

import argparse
import json
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from benchmarks import paired
from diffray import DiffusionLLM, SamplingParams
from diffray.cluster.cli.bench.datasets import random_ids

BLOCK, TOKENS = 32, 64


def write_adapters(checkpoint: Path, folder: Path, count: int, rank: int) -> dict[str, str]:
    """Write adapters for the linear layers of a dense model that is one file."""
    with safe_open(checkpoint / "model.safetensors", "pt") as file:
        shapes = {name: file.get_slice(name).get_shape() for name in file.keys()}  # noqa: SIM118
    layers = {n: s for n, s in shapes.items() if "blocks." in n and len(s) == 2}
    found = {}
    for number in range(count):
        tensors = {}
        for name, (rows, columns) in layers.items():
            base = f"base_model.model.{name.removesuffix('.weight')}"
            tensors[f"{base}.lora_A.weight"] = torch.randn(rank, columns) * 0.02
            tensors[f"{base}.lora_B.weight"] = torch.randn(rows, rank) * 0.02
        path = folder / f"adapter-{number}"
        path.mkdir()
        save_file(tensors, path / "adapter_model.safetensors")
        config = {"peft_type": "LORA", "r": rank, "lora_alpha": rank}
        (path / "adapter_config.json").write_text(json.dumps(config))
        found[path.name] = str(path)
    return found


def measure(llm: DiffusionLLM, args: argparse.Namespace, clock: paired.Clock) -> str:
    """Return one row of the table."""
    prompts = random_ids(llm, args.batch, 32, args.seed)

    def contender(names: list[str]) -> Callable[[int], paired.Turn]:
        policy = {"block_length": BLOCK, "decoder": {"kind": "fixed", "steps": BLOCK}}
        asked = [
            SamplingParams(max_tokens=TOKENS, ignore_eos=True, diffusion=policy, lora=name)
            for name in names
        ]
        return clock.timed(lambda _: paired.generate(llm, prompts, asked))

    names = [*llm.adapters.names]
    contenders = {
        "none": contender([""] * args.batch),
        "adapted": contender([names[row % len(names)] for row in range(args.batch)]),
    }
    none, adapted = paired.take_turns(contenders, args.repeats).values()
    steps = [[turn.seconds / max(turn.forwards) for turn in turns] for turns in (none, adapted)]
    cells = [f"{1000 * min(each):.0f}" for each in steps]
    return paired.row(args.batch, len(names), args.rank, *cells, paired.ratio(steps[1], steps[0]))


def main() -> None:
    parser = paired.parser(__doc__, turns=3)
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("--batch", type=int, default=8, help="sequences that run together")
    parser.add_argument("--adapters", type=int, default=4)
    parser.add_argument("--rank", type=int, default=16)
    args = parser.parse_args()
    clock = paired.clock_of(args)
    print(clock.label)
    print(paired.head("batch", "adapters", "rank", "none, ms a forward", "adapted, ms", "ratio"))
    with tempfile.TemporaryDirectory() as folder:
        adapters = write_adapters(args.checkpoint, Path(folder), args.adapters, args.rank)
        options = {"dtype": "float32", "max_num_seqs": args.batch, "lora_modules": adapters}
        with DiffusionLLM(str(args.checkpoint), **options) as llm:
            print(measure(llm, args, clock), flush=True)


if __name__ == "__main__":
    main()
