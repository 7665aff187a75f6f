"""Compares the engine with diffusers' LLaDA2 pipeline and with Fast-dLLM, each in its process.

Both sides write the same number of tokens after a prompt, in whole blocks, and ignore end tokens.
The pipeline takes one prompt at a time, because it pads batches on the left, which would shift
LLaDA2's blocks; Fast-dLLM does where prompts or answers are of different lengths.
"""

import argparse
import json
import random
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks import paired
from benchmarks.golden import cases_of
from benchmarks.peers.table import System, environment, variables
from benchmarks.peers.table import compare as compare_systems
from benchmarks.random_checkpoint import GOLDEN
from diffray import DiffusionLLM, SamplingParams
from diffray.cluster.cli.datasets import Row, as_ids
from diffray.components.checkpoints.folder import resolve
from examples.train_demo.tasks import held_out_items

BLOCK_LENGTH = 32
AT_ONCE = 8  # questions that the engine answers together
LLADA2 = "demo-llada2"
Send = Callable[[Any], Any]


def compare(codes: dict[str, Path], args: argparse.Namespace, clock: paired.Clock) -> None:
    for peer, code in codes.items():
        {"diffusers": diffusers, "fast-dllm": fast_dllm}[peer](code, args, clock)


@contextmanager
def process(
    peer: str, python: Path, checkpoint: Path, code: Path, args: argparse.Namespace
) -> Iterator[Send]:
    """Run a peer; yield a function that sends it a request."""
    script, threads = Path(__file__).with_name("process.py"), 1 if args.cpu_time else args.threads
    command = [str(word) for word in (python, script, peer, checkpoint, threads, code)]
    with paired.answering(command, variables(threads)) as send:
        yield lambda request: send(request | {"cpu_time": args.cpu_time})


def engine(
    llm: DiffusionLLM, clock: paired.Clock, prompts: list[list[int]], lengths: list[int],
    at_once: bool, **diffusion: Any,
) -> Callable[[int], paired.Turn]:  # fmt: skip
    whole = {"block_length": BLOCK_LENGTH, "canvas": "fixed"} | diffusion
    params = [SamplingParams(max_tokens=n, ignore_eos=True, diffusion=whole) for n in lengths]
    return clock.timed(lambda _: paired.generate(llm, prompts, params, at_once=at_once))


def gen_length(prompt: list[int], wanted: int) -> int:
    """Return the least number from `wanted` with which prompt and answer fill whole blocks."""
    return wanted + -(len(prompt) + wanted) % BLOCK_LENGTH


def diffusers(code: Path, args: argparse.Namespace, clock: paired.Clock) -> None:
    python = environment(args.folder, "diffusers")
    folder = args.folder.resolve() / f"{LLADA2}-with-code"
    shutil.copytree(resolve(LLADA2), folder, dirs_exist_ok=True)
    names = {
        "AutoConfig": "configuration_llada2_moe.LLaDA2MoeConfig",
        "AutoModelForCausalLM": "modeling_llada2_moe.LLaDA2MoeModelLM",
    }
    put_code(folder, code, names)
    with (
        DiffusionLLM(
            LLADA2,
            dtype="float32",
            max_num_seqs=AT_ONCE,
            enable_prefix_caching=False,  # every turn has the same prompts
        ) as llm,
        process("diffusers", python, folder, code, args) as send,
    ):
        items = held_out_items(args.questions, seed=args.seed)
        prompts = as_ids(llm, [Row("demo", item.question) for item in items], raw=False)
        lengths = [gen_length(prompt, args.gen_length or 64) for prompt in prompts]
        rule = {"kind": "threshold", "threshold": 0.95}
        request = {"prompts": prompts, "gen_lengths": lengths, "block_length": BLOCK_LENGTH}
        request |= {"threshold": 0.95, "mask_id": llm.engine.limits.mask_token_id}

        def pipeline(block_causal: bool) -> Callable[[int], paired.Turn]:
            return lambda _: paired.Turn(*send(request | {"block_causal": block_causal}))

        def ours(at_once: bool) -> Callable[[int], paired.Turn]:
            return engine(llm, clock, prompts, lengths, at_once, decoder=rule)

        systems = [
            System("diffray, one by one", ours(at_once=False)),
            System("diffray, all at once", ours(at_once=True)),
            System("diffusers, given LLaDA2's mask", pipeline(block_causal=True)),
            System("diffusers, as it is", pipeline(block_causal=False)),
        ]
        work = f"{LLADA2}, {args.questions} questions, all at once is {AT_ONCE} at once"
        compare_systems(work, systems, args.repeats)


def put_code(folder: Path, code: Path, names: dict[str, str]) -> None:
    """Put the modelling code beside the weights, and the names of its classes in config.json."""
    for name in {each.partition(".")[0] for each in names.values()}:
        shutil.copyfile(code / f"{name}.py", folder / f"{name}.py")
    config = json.loads((folder / "config.json").read_text()) | {"auto_map": names}
    (folder / "config.json").write_text(json.dumps(config, indent=1) + "\n")


def turn(send: Send, request: dict[str, Any], _: int) -> paired.Turn:
    return paired.Turn(*send(request))


def fast_dllm(code: Path, args: argparse.Namespace, clock: paired.Clock) -> None:
    """Reproduce Fast-dLLM's golden cases, then compare: threshold 0.9, dual cache."""
    python = Path(sys.executable)
    with process("fast-dllm", python, GOLDEN / "llada", code, args) as send:
        print(reproduced(send))
    for checkpoint in args.checkpoints:
        config = json.loads((checkpoint / "config.json").read_text())
        with (
            DiffusionLLM(
                str(checkpoint), dtype="float32", max_num_seqs=max(args.concurrency)
            ) as llm,
            process("fast-dllm", python, checkpoint, code, args) as send,
        ):
            for name, prompts, lengths in works(config["mask_token_id"], args):
                options = {"block_length": BLOCK_LENGTH, "threshold": 0.9}
                request = {"prompts": prompts, "gen_lengths": lengths, "cache": "dual"}
                request |= {"options": options}
                ours = {
                    "iteration": {"kind": "blockwise"},
                    "decoder": {"kind": "threshold", "threshold": 0.9},
                    "cache": {"kind": "dual"},
                }
                systems = [
                    System("diffray", engine(llm, clock, prompts, lengths, at_once=True, **ours)),
                    System("Fast-dLLM", partial(turn, send, request)),
                ]
                compare_systems(f"{checkpoint.name}, {name}", systems, args.repeats)


def reproduced(send: Send) -> str:
    """Return how many of its golden cases Fast-dLLM reproduces: it is run as intended."""
    cases = [case for case in cases_of("llada") if case["source"] == "fast-dllm"]
    equal = 0
    for case in cases:
        names = ("steps", "threshold", "block_length")
        options = {name: case[name] for name in names if name in case}
        request = {"prompts": [case["prompt"]], "gen_lengths": [case["gen_length"]]}
        _, rows, _ = send(request | {"cache": case["cache"], "options": options})
        equal += rows[0] == case["tokens"]
    return f"Fast-dLLM reproduces {equal} of its {len(cases)} golden cases"


def works(
    special: int, args: argparse.Namespace
) -> Iterator[tuple[str, list[list[int]], list[int]]]:
    """Yield batches of equal requests, then unequal ones; the ids from `special` on are special."""
    draws = random.Random(args.seed)
    lengths = args.prompt_length or (64, 64)

    def drawn(shortest: int, longest: int) -> list[int]:
        return draws.choices(range(special), k=draws.randint(shortest, longest))

    prompts = [drawn(*lengths) for _ in range(max(args.concurrency))]
    for batch in args.concurrency:
        yield f"batch {batch}", prompts[:batch], [args.gen_length or 128] * batch
    if args.ragged:  # Fast-dLLM writes whole blocks only
        unequal = [drawn(16, 96) for _ in range(args.ragged)]
        answers = [BLOCK_LENGTH * draws.randint(1, 4) for _ in unequal]
        yield f"{args.ragged} unequal requests", unequal, answers
