"""Measures what structured outputs cost: seconds per forward of the same requests, free and guided.

    python -m benchmarks.random_checkpoint /tmp/llada-100m
    python -m benchmarks.structured --threads 1 --cpu-time /tmp/llada-100m

A checkpoint without a tokenizer gets one, trained on the sources of Python's library. Every answer
fills its canvas, one position per forward, so both take the same forwards.
"""

import argparse
import sysconfig
from collections.abc import Callable
from pathlib import Path
from typing import Unpack

from tokenizers import ByteLevelBPETokenizer
from transformers import PreTrainedTokenizerFast

from benchmarks import paired
from diffray import DiffusionLLM, SamplingParams
from diffray.cluster.cli.bench.datasets import random_ids
from diffray.components.params import SamplingKeywords

BLOCK = 32
TOKENS = 64
# Names as long as the canvas, so that no answer ends before its last position.
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "age": {"type": "integer"},
        "tags": {"type": "array", "items": {"enum": ["red", "green", "blue"]}},
        "job": {"anyOf": [{"type": "string", "minLength": 40}, {"type": "number"}]},
    },
    "required": ["name", "age", "tags", "job"],
    "additionalProperties": False,
}


def add_tokenizer(folder: Path, size: int) -> None:
    """Write a byte-level BPE tokenizer whose end token is the last id but one."""
    sources = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    trained = ByteLevelBPETokenizer()
    trained.train(list(map(str, sources)), vocab_size=size - 2, show_progress=False)
    made = PreTrainedTokenizerFast(tokenizer_object=trained._tokenizer)
    missing = [f"<unused {number}>" for number in range(size - 2 - len(made))]
    made.add_tokens(missing)
    made.add_special_tokens({"mask_token": "<mask>", "eos_token": "<end>"})
    made.save_pretrained(folder)


def measure(llm: DiffusionLLM, args: argparse.Namespace, clock: paired.Clock) -> str:
    """Return one row of the table."""
    prompts = random_ids(llm, args.batch, 32, args.seed)

    def params(**others: Unpack[SamplingKeywords]) -> list[SamplingParams]:
        policy = {"block_length": BLOCK, "decoder": {"kind": "fixed", "steps": BLOCK}}
        others |= {"max_tokens": TOKENS, "temperature": args.temperature, "diffusion": policy}
        return [SamplingParams(**others)] * args.batch

    works = {
        "free": params(ignore_eos=True),
        "guided": params(structured_outputs={"json": SCHEMA}),
    }

    def contender(work: list[SamplingParams]) -> Callable[[int], paired.Turn]:
        return clock.timed(lambda _: paired.generate(llm, prompts, work))

    contenders = {name: contender(work) for name, work in works.items()}
    free, guided = paired.take_turns(contenders, args.repeats).values()
    steps = [[turn.seconds / max(turn.forwards) for turn in turns] for turns in (free, guided)]
    cells = [f"{1000 * min(each):.0f}" for each in steps]
    return paired.row(args.batch, args.temperature, *cells, paired.ratio(steps[1], steps[0]))


def main() -> None:
    parser = paired.parser(__doc__, turns=5)
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("--batch", type=int, default=8, help="sequences that run together")
    parser.add_argument("--temperature", type=float, default=0.0)
    args = parser.parse_args()
    clock = paired.clock_of(args)
    if not (args.checkpoint / "tokenizer.json").exists():
        add_tokenizer(args.checkpoint, 32000)
    print(clock.label)
    print(paired.head("batch", "temperature", "free, ms a forward", "guided, ms", "ratio"))
    with DiffusionLLM(str(args.checkpoint), dtype="float32", max_num_seqs=args.batch) as llm:
        print(measure(llm, args, clock), flush=True)


if __name__ == "__main__":
    main()
