"""Compares diffray with its peers: same weights, prompts and threads, in turns.

    git clone https://github.com/NVlabs/Fast-dLLM; git clone https://github.com/ML-GSAI/LLaDA
    git clone https://github.com/ZHZisZZ/dllm
    python -m benchmarks.peers dlmserve dfastllm --fast-dllm Fast-dLLM
    python -m benchmarks.peers diffusers --llada2-code dllm/dllm/pipelines/llada2/models
    python -m benchmarks.peers fast-dllm --fast-dllm Fast-dLLM --checkpoints /tmp/llada-100m
    python -m benchmarks.peers sampler --llada LLaDA

dlmserve and dfastllm are served beside `diffray serve`; diffusers and Fast-dLLM run in a process
each, and LLaDA's sampler runs this project's model. docs/benchmarks.md explains the tables.
"""

import argparse
import importlib
import signal
import sys
from pathlib import Path

from benchmarks import paired
from benchmarks.random_checkpoint import GOLDEN

# peer -> its module, the option that names the checkout that it needs, and a file in that
PEERS = {
    "dlmserve": ("servers", "fast_dllm", "modeling_llada.py"),
    "dfastllm": ("servers", "fast_dllm", "modeling_llada.py"),
    "diffusers": ("offline", "llada2_code", "modeling_llada2_moe.py"),
    "fast-dllm": ("offline", "fast_dllm", "modeling_llada.py"),
    "sampler": ("sampler", "llada", "generate.py"),
}


def parser() -> argparse.ArgumentParser:
    made = paired.parser(__doc__, turns=3)
    made.add_argument("peers", nargs="+", choices=PEERS)
    made.add_argument("--folder", type=Path, default=Path("build/peers"), help="for environments")
    made.add_argument("--fast-dllm", type=Path, help="a checkout of NVlabs/Fast-dLLM")
    made.add_argument("--llada", type=Path, help="a checkout of ML-GSAI/LLaDA")
    made.add_argument("--llada2-code", type=Path, help="the folder of modeling_llada2_moe.py")
    made.add_argument("--concurrency", type=int, nargs="+", default=[1, 8], help="or batch")
    made.add_argument("--prompt-length", type=int, nargs=2, metavar=("MIN", "MAX"))
    made.add_argument("--gen-length", type=int, help="default: 64, Fast-dLLM 128, the sampler 96")
    made.add_argument("--steps", type=int, default=16, help="of an answer, for servers")
    made.add_argument("--layers", type=int, default=12, help="of the servers' random LLaDA")
    made.add_argument("--hidden", type=int, default=640, help="a multiple of 64")
    made.add_argument("--questions", type=int, default=32, help="for diffusers and the sampler")
    made.add_argument("--checkpoints", type=Path, nargs="+", default=[GOLDEN / "llada"])
    made.add_argument("--ragged", type=int, default=0, help="also N unequal requests to Fast-dLLM")
    return made


def code_folder(args: argparse.Namespace, peer: str) -> Path:
    """Return the folder of a peer's code in its checkout, the topmost if there are several."""
    _, option, file = PEERS[peer]
    checkout: Path | None = getattr(args, option)
    flag = f"--{option.replace('_', '-')}"
    if checkout is None:
        raise ValueError(f"{peer} needs {flag} FOLDER; give it, or name other peers")
    found = sorted(checkout.rglob(file), key=lambda path: (len(path.parts), path))
    if not found:
        raise ValueError(f"{flag} {checkout} has no {file}; give a checkout that has it")
    return found[0].parent


def run(args: argparse.Namespace) -> None:
    """Print a table for each peer; servers are all compared in one."""
    folders = {peer: code_folder(args, peer) for peer in PEERS if peer in args.peers}
    clock = paired.clock_of(args)
    print(f"float32, {clock.label}, {args.repeats} turns")
    for module in dict.fromkeys(PEERS[peer][0] for peer in folders):
        own = {peer: folder for peer, folder in folders.items() if PEERS[peer][0] == module}
        importlib.import_module(f"benchmarks.peers.{module}").compare(own, args, clock)


def main() -> None:
    made = parser()
    # SIGTERM must end servers too.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    try:
        run(made.parse_args())
    except ValueError as error:
        sys.exit(f"{made.prog}: {error}")


if __name__ == "__main__":
    main()
