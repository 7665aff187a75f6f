"""Compares an autoregressive GGUF model with llama.cpp: processor seconds of steps, in turns.

    npm pack @node-llama-cpp/linux-x64@3.22.1 && tar xzf node-llama-cpp-linux-x64-3.22.1.tgz
    python -m benchmarks.peers.llama_cpp SmolLM2-135M-Instruct.Q4_1.gguf \\
        --library package/bins/linux-x64
    python -m benchmarks.peers.llama_cpp demo-chat --prompts 20 --tokens 128 \\
        --library package/bins/linux-x64

Each side runs in a process of its own with one thread: a prompt for every sequence of a batch, then
greedy tokens, whose time counts. Of demo-chat also without drafts, one token after the other.
"""

import argparse
import json
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Final

from benchmarks import paired
from benchmarks.peers.llama_cpp_library import PEER, LlamaCpp, alone
from benchmarks.peers.table import OURS, System, compare
from diffray.cluster.cli.datasets import read_rows
from diffray.cluster.frontend.text import Tokenizer
from diffray.components.checkpoints.demos import CHAT, smollm2
from diffray.components.checkpoints.folder import resolve

ONE_BY_ONE: Final = f"{OURS}, one token at a time"
PROMPT: Final = 64  # tokens
Prompts = list[list[int]]
Answered = tuple[float, list[list[int]], int]  # seconds, tokens of each sequence, steps


def theirs(args: argparse.Namespace, groups: list[Prompts], end: int | None) -> Iterator[Answered]:
    """Yield the seconds of the steps after each group's prompts, the tokens, and the steps."""
    peer = LlamaCpp(args.library.resolve(), args.file)
    for prompts in groups:
        found = [[token] for token in peer.read(prompts, args.tokens)]
        begin = time.process_time()
        while len(found[0]) < args.tokens and not (end is not None and found[0][-1] == end):
            for row, token in zip(found, peer.step(), strict=True):
                row.append(token)
        yield time.process_time() - begin, found, len(found[0]) - 1


def ours(args: argparse.Namespace, groups: list[Prompts], end: int | None) -> Iterator[Answered]:
    """Yield the same of an engine."""
    from diffray.components.mesh import Mesh
    from diffray.components.params import SamplingParams
    from diffray.workers.engine_options import EngineOptions
    from diffray.workers.messages import Request
    from diffray.workers.setup import build_rank

    options = EngineOptions(dtype="float32", device="cpu", max_num_seqs=len(groups[0]))
    engine = build_rank(args.model, options, Mesh())
    diffusion = {} if args.side == OURS else {"iteration": "autoregressive"}
    params = SamplingParams(max_tokens=args.tokens, ignore_eos=end is None, diffusion=diffusion)
    for prompts in groups:
        found: list[list[int]] = [[] for _ in prompts]
        for number, prompt in enumerate(prompts):
            engine.add(Request(number, tuple(prompt), params))
        begin = forwards = 0.0
        while not engine.idle:
            if all(found):
                begin, forwards = begin or time.process_time(), forwards + 1
            for update in engine.step(1):
                found[update.uid] += update.ids
        yield time.process_time() - begin, found, int(forwards)


def turn(args: argparse.Namespace, side: str, batch: int, _: int) -> paired.Turn:
    """Run a side in a process of its own."""
    words = [args.model, "--library", str(args.library), "--batch", str(batch)]
    words += ["--tokens", str(args.tokens), "--prompts", str(args.prompts)]
    return alone("benchmarks.peers.llama_cpp", side, words)


def run_side(args: argparse.Namespace) -> None:
    """Print the processor seconds of the steps, the tokens after the first, and the steps."""
    groups, end = [[[*range(100 + n, 100 + n + PROMPT)] for n in range(args.batch[0])]], None
    if args.prompts:
        tokenizer = Tokenizer.load(resolve(args.model), -1)
        assert tokenizer is not None
        rows = read_rows("chat", None, args.prompts)
        asked = [tokenizer.encode_chat([{"role": "user", "content": row.prompt}]) for row in rows]
        groups, end = [[ids] for ids in asked], tokenizer.fast.eos_token_id
    answered = [*(theirs if args.side == PEER else ours)(args, groups, end)]
    seconds = sum(each[0] for each in answered)
    steps = [forwards for _, found, forwards in answered for _ in found]
    print(json.dumps([seconds, [row[1:] for _, found, _ in answered for row in found], steps]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("model", help="a GGUF file, or demo-chat")
    parser.add_argument("--library", type=Path, required=True, help="the folder of libllama")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8, 16])
    parser.add_argument("--prompts", type=int, default=0, help="of the data set chat, one by one")
    parser.add_argument("--tokens", type=int, default=48, help="the most of a sequence")
    parser.add_argument("--repeats", type=int, default=3, help="turns, after one that warms up")
    parser.add_argument("--side", help=argparse.SUPPRESS)
    args = parser.parse_args()
    args.file = str(smollm2()) if args.model == CHAT else args.model
    if args.side:
        return run_side(args)
    sides = [OURS, ONE_BY_ONE] if args.model == CHAT else [OURS]
    for batch in [1] if args.prompts else args.batch:
        systems = [System(n, partial(turn, args, n, batch)) for n in (*sides, PEER)]
        work = f"{args.prompts} prompts one by one" if args.prompts else f"{batch} sequences"
        compare(f"{work}, one thread, processor seconds", systems, args.repeats)


if __name__ == "__main__":
    main()
