"""The command's options: which peers, with which checkouts, at which sizes."""

import argparse
import os
from pathlib import Path

from benchmarks.peers.checkpoint import HEAD_DIM, LLADA2_CODE, LLADA_CODE, code_folder

# peer -> the option that names the checkout that it needs, and files that must be in it
PEERS: dict[str, tuple[str, tuple[str, ...]]] = {
    "dlmserve": ("fast_dllm", LLADA_CODE),
    "dfastllm": ("fast_dllm", LLADA_CODE),
    "diffusers": ("llada2_code", LLADA2_CODE),
    "fast-dllm": ("fast_dllm", LLADA_CODE),
    "sampler": ("llada", ("generate.py",)),
}


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        prog="python -m benchmarks.peers",
        description="Compare diffray with its peers: same weights, prompts and threads, in turns.",
    )
    made.add_argument("peers", nargs="*", metavar="PEER", help=f"{', '.join(PEERS)}; default: all")
    made.add_argument("--folder", type=Path, default=Path("build/peers"), help="for environments")
    made.add_argument("--fast-dllm", type=Path, help="a checkout of NVlabs/Fast-dLLM")
    made.add_argument("--llada", type=Path, help="a checkout of ML-GSAI/LLaDA")
    made.add_argument("--llada2-code", type=Path, help="the folder of modeling_llada2_moe.py")
    made.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    made.add_argument("--turns", type=int, default=3, help="after one that warms up")
    made.add_argument("--concurrency", type=int, nargs="+", default=[1, 8])
    made.add_argument("--requests", type=int, help="of each turn; else the concurrency, or 4")
    made.add_argument(
        "--prompt-length", type=int, nargs=2, default=[24, 40], metavar=("MIN", "MAX")
    )
    made.add_argument("--gen-length", type=int, default=64)
    made.add_argument("--steps", type=int, default=16, help="of a whole answer, for servers")
    made.add_argument("--block-length", type=int, default=32, help="for diffray with a cache")
    made.add_argument("--layers", type=int, default=12, help="of the servers' random LLaDA")
    made.add_argument("--hidden", type=int, default=640)
    made.add_argument("--seed", type=int, default=1)
    made.add_argument("--llada2", default="demo-llada2", help="diffusers' checkpoint")
    made.add_argument("--questions", type=int, default=32, help="for diffusers")
    made.add_argument("--make-only", action="store_true", help="make the environments and exit")
    return made


def chosen(args: argparse.Namespace) -> list[str]:
    """Return the peers to run; refuse unknown ones, and missing or wrong checkouts."""
    wanted = args.peers or list(PEERS)
    for name in wanted:
        if name not in PEERS:
            raise ValueError(f"{name!r} is not a peer; choose from {', '.join(PEERS)}")
        option, files = PEERS[name]
        flag = "--" + option.replace("_", "-")
        given: Path | None = getattr(args, option)
        if given is None:
            raise ValueError(f"{name} needs {flag} FOLDER; give it, or name other peers")
        if not given.is_dir():
            raise ValueError(f"{flag} {given} is not a folder; give a checkout")
        code_folder(given, files)
    return [name for name in PEERS if name in wanted]


def check(args: argparse.Namespace) -> None:
    """Refuse sizes with which the systems could not do the same work."""
    if args.gen_length % args.steps:
        raise ValueError("--gen-length must be a multiple of --steps: peers round differently")
    if args.gen_length % args.block_length or args.steps % (args.gen_length // args.block_length):
        raise ValueError("--block-length must divide --gen-length, and its blocks divide --steps")
    if args.hidden % HEAD_DIM or args.hidden <= 0:
        raise ValueError(f"--hidden must be a multiple of {HEAD_DIM}, the size of a head")
    shortest, longest = args.prompt_length
    counts = [args.questions, args.turns, args.threads, args.layers, shortest, *args.concurrency]
    counts += [] if args.requests is None else [args.requests]
    if min(counts) < 1 or shortest > longest:
        raise ValueError("counts and lengths must be at least 1, --prompt-length MIN at most MAX")
