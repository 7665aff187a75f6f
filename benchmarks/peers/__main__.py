"""Compares diffray with its peers: `python -m benchmarks.peers --fast-dllm FOLDER ...`.

    git clone https://github.com/NVlabs/Fast-dLLM
    git clone https://github.com/ML-GSAI/LLaDA
    git clone https://github.com/ZHZisZZ/dllm
    python -m benchmarks.peers --fast-dllm Fast-dLLM --llada LLaDA \
        --llada2-code dllm/dllm/pipelines/llada2/models

dlmserve and dfastllm are served, each in its own environment, beside `diffray serve`;
diffusers' LLaDA2 pipeline runs in its own environment beside the engine; Fast-dLLM and
LLaDA's sampler run in one process with the engine. docs/benchmarks.md explains the tables.
"""

import argparse
import signal
import subprocess
import sys

from benchmarks.peers import plan
from benchmarks.peers.environments import REQUIREMENTS, Environment


def in_one_process(name: str, args: argparse.Namespace) -> None:
    """Run the program of a peer that shares the engine's process."""
    options = {
        "fast-dllm": ["benchmarks.compare_fast_dllm", "--fast-dllm", args.fast_dllm, "--ragged=16"],
        "sampler": ["benchmarks.compare_sampler", "--llada", args.llada],
    }[name]
    command = [sys.executable, "-m", *map(str, options), "--threads", str(args.threads)]
    if subprocess.run(command).returncode:
        raise ValueError(f"{name} could not be compared; see the messages above")


def run(args: argparse.Namespace) -> None:
    peers = plan.chosen(args)
    plan.check(args)
    made = {
        name: Environment(args.folder.resolve() / name, requirements)
        for name, requirements in REQUIREMENTS.items()
        if name in peers
    }
    for environment in made.values():
        environment.make()
    if args.make_only:
        return
    if servers := [name for name in peers if name in ("dlmserve", "dfastllm")]:
        from benchmarks.peers import served

        served.compare(servers, args, made)
    if "diffusers" in peers:
        from benchmarks.peers import offline

        offline.compare(args, made["diffusers"])
    for name in ("fast-dllm", "sampler"):
        if name in peers:
            in_one_process(name, args)


def main() -> None:
    parser = plan.parser()
    args = parser.parse_args()
    # SIGTERM must end servers too.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    try:
        run(args)
    except ValueError as error:
        sys.exit(f"{parser.prog}: {error}")


if __name__ == "__main__":
    main()
