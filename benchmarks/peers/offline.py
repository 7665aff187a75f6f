"""Compares the engine with diffusers' LLaDA2 pipeline: same weights, threshold, prompts, in turns.

Both write the same number of tokens for a prompt, chosen so that the canvas consists of whole
blocks, and ignore end tokens. The pipeline has no cache and recomputes everything up to the block's
end in each step. It takes one prompt at a time here, because it pads batches on the left, which
would shift LLaDA2's blocks. The engine runs prompts one by one too, and then all at once.
"""

import argparse
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from benchmarks import paired
from benchmarks.peers import checkpoint
from benchmarks.peers.environments import Environment
from benchmarks.peers.servers import process_variables
from diffray import DiffusionLLM, SamplingParams
from diffray.cluster.cli.datasets import Row, as_ids
from examples.train_demo.tasks import held_out_items

BLOCK_LENGTH, THRESHOLD = 32, 0.95
AT_ONCE = 8  # sequences that the engine runs together
HEAD = paired.head("system", "tokens/s", "diffray / it", "forwards", "equal tokens")


def gen_length(prompt: list[int], wanted: int) -> int:
    """Return the least number from `wanted` with which prompt and answer fill whole blocks."""
    return wanted + -(len(prompt) + wanted) % BLOCK_LENGTH


def contenders(
    llm: DiffusionLLM, send: Callable[[Any], Any], prompts: list[list[int]], wanted: int
) -> dict[str, Callable[[int], paired.Turn]]:
    """Return the engine, and the pipeline behind `send`, each in two ways."""
    lengths = [gen_length(prompt, wanted) for prompt in prompts]
    diffusion = {
        "block_length": BLOCK_LENGTH,
        "decoder": {"kind": "threshold", "threshold": THRESHOLD},
        "canvas": "fixed",
    }
    params = [
        SamplingParams(max_tokens=length, ignore_eos=True, diffusion=diffusion)
        for length in lengths
    ]
    request = {
        "prompts": prompts,
        "gen_lengths": lengths,
        "block_length": BLOCK_LENGTH,
        "threshold": THRESHOLD,
        "mask_id": llm.engine.limits.mask_token_id,
    }

    def engine(at_once: bool) -> Callable[[int], paired.Turn]:
        clock = paired.Clock(time.perf_counter)
        return clock.timed(lambda _: paired.generate(llm, prompts, params, at_once=at_once))

    def pipeline(block_causal: bool) -> Callable[[int], paired.Turn]:
        return lambda _: paired.Turn(*send(request | {"block_causal": block_causal}))

    return {
        "diffray, one by one": engine(at_once=False),
        "diffray, all at once": engine(at_once=True),
        "diffusers, given LLaDA2's mask": pipeline(block_causal=True),
        "diffusers, as it is": pipeline(block_causal=False),
    }


def compare(args: argparse.Namespace, environment: Environment) -> None:
    """Print the table."""
    code = checkpoint.code_folder(args.llada2_code, checkpoint.LLADA2_CODE)
    folder = args.folder.resolve() / f"{Path(args.llada2).name}-with-code"
    checkpoint.copy_llada2(args.llada2, folder, code)
    script = str(Path(__file__).with_name("run_diffusers.py"))
    command = [str(environment.python), script, str(folder), str(args.threads)]
    torch.set_num_threads(args.threads)
    with (
        DiffusionLLM(
            args.llada2,
            dtype="float32",
            max_num_seqs=AT_ONCE,
            enable_prefix_caching=False,  # every turn has the same prompts
        ) as llm,
        paired.answering(command, process_variables(args.threads)) as send,
    ):
        items = held_out_items(args.questions, seed=args.seed)
        prompts = as_ids(llm, [Row("demo", item.question) for item in items], raw=False)
        turns = paired.take_turns(
            contenders(llm, send, prompts, args.gen_length),
            args.turns,
            describe=lambda turn: f"{turn.rate:.1f} tokens/s",
        )
    sizes = f"{args.questions} prompts, all at once is {AT_ONCE} at once"
    print(f"{args.llada2}, float32, {args.threads} threads, {sizes}")
    print(HEAD)
    first, *_ = turns.values()
    for name, found in turns.items():
        ratio = "1" if found is first else paired.speedup(first, found)
        cells = ratio, sum(found[-1].forwards), paired.equal_tokens(first, found)
        print(paired.row(name, paired.rate(found), *cells), flush=True)
