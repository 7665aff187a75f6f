"""Measures what other work on the machine costs: `python -m benchmarks.busy`, on a CPU.

The systems are the engine in process, one server, and two replicas, each started once for every
setting. The settings take turns, on the machine as it is and beside processes that keep every core
busy. "plain" is the C library's own waiting (300,000 polls for work) with a thread for each core in
every rank; "now" is the package's default, which tries numbers of threads; "1 thread" has that.
`--spins` adds other numbers of polls, with as many threads as cores; `--model` measures another
checkpoint, only in process. The table has tokens per second, their ratio to "plain" (the median
over turns), and all processes' CPU seconds per 1,000 tokens.
"""

import argparse
import asyncio
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import NamedTuple

from benchmarks import load, paired
from benchmarks.other_work import busy
from benchmarks.serve_process import ServeProcess, serve_process
from diffray import DiffusionLLM, SamplingParams
from diffray.cluster.cli.bench.datasets import random_ids
from diffray.components.container import usable_cores

TOKENS = 32
WARM_S = 5  # of the turn that does not count, for the engine to find its number of threads
REQUESTS = {1: 4, 8: 16}  # per turn, by the number in flight
TICKS = os.sysconf("SC_CLK_TCK")
LABELS = {"engine": "engine", "1": "one server", "2": "two replicas"}


@dataclass(frozen=True, slots=True)
class Setting:
    """How threads wait, and how many each rank has; None: the package's default."""

    name: str
    spins: int | None = None
    threads: int | None = None

    def variables(self) -> dict[str, str]:
        return {} if self.spins is None else {"GOMP_SPINCOUNT": str(self.spins)}


class Turn(NamedTuple):
    rate: float  # tokens per second
    work: float  # CPU seconds per 1,000 tokens


Run = Callable[[int], Turn]  # runs a turn with this number of requests in flight


def work_offline(model: str, threads: int | None) -> None:
    """Run a turn for every line of stdin; print its seconds and CPU seconds."""
    most = max(REQUESTS.values())
    with DiffusionLLM(
        model, device="cpu", dtype="float32", max_num_seqs=max(REQUESTS), cpu_threads=threads
    ) as llm:
        if llm.tokenizer is None:
            prompts = random_ids(llm, most, 32, seed=7)
        else:
            chats = [body["messages"] for body in load.chats(most, TOKENS)]
            prompts = [llm.tokenizer.encode_chat(messages) for messages in chats]
        params = SamplingParams(max_tokens=TOKENS, ignore_eos=True, seed=0)
        for line in sys.stdin:
            at_once = int(line)
            chosen = prompts[: REQUESTS[at_once]]
            begin, before = time.perf_counter(), time.process_time()
            for first in range(0, len(chosen), at_once):
                llm.generate(chosen[first : first + at_once], params, use_tqdm=False)
            spent = time.perf_counter() - begin, time.process_time() - before
            print(json.dumps(spent), flush=True)


@contextmanager
def offline(model: str, setting: Setting) -> Iterator[Run]:
    """Start a process with the engine; yield a function that runs a turn in it."""
    call = f"work_offline({model!r}, {setting.threads})"
    command = [sys.executable, "-c", f"from benchmarks.busy import work_offline; {call}"]
    with paired.answering(command, setting.variables()) as send:

        def run(at_once: int) -> Turn:
            seconds, work = send(at_once)
            tokens = REQUESTS[at_once] * TOKENS
            return Turn(tokens / seconds, work / tokens * 1000)

        yield run


@contextmanager
def served(replicas: int, setting: Setting) -> Iterator[Run]:
    """Start a server; yield a function that runs a turn against it."""
    flags = ["demo", "--device", "cpu", "--dtype", "float32", "--replicas", str(replicas)]
    if setting.threads is not None:
        flags += ["--cpu-threads", str(setting.threads)]
    # As the command itself sets it; the default of `serve_process` is one thread.
    settings = setting.variables() | {"OMP_NUM_THREADS": str(max(usable_cores() // replicas, 1))}
    with serve_process(*flags, settings=settings) as server:
        server.wait_for("/v1", 1)

        def run(at_once: int) -> Turn:
            bodies = [{"model": "demo"} | each for each in load.chats(REQUESTS[at_once], TOKENS)]
            before = processor_seconds(server)
            rate = asyncio.run(load.served_rate(server.url, bodies, at_once))
            work = processor_seconds(server) - before
            return Turn(rate, work / (len(bodies) * TOKENS) * 1000)

        yield run


def processor_seconds(server: ServeProcess) -> float:
    """Return the CPU seconds that all processes of a server have used since their start."""
    ticks = 0
    for pid in server.processes():
        words = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        ticks += int(words[11]) + int(words[12])
    return ticks / TICKS


def measure(system: str, beside: str, runs: dict[str, Run], turns: int) -> None:
    """Let the settings of a system take turns, and print their rows; ratios are to the first."""

    def contender(run: Run) -> Callable[[int], dict[int, Turn]]:
        def act(number: int) -> dict[int, Turn]:
            end = time.monotonic() + (0 if number else WARM_S)
            while True:
                turns = {at_once: run(at_once) for at_once in REQUESTS}
                if time.monotonic() >= end:
                    return turns

        return act

    found = paired.take_turns({name: contender(run) for name, run in runs.items()}, turns)
    for at_once in REQUESTS:
        own = {name: [turn[at_once] for turn in all_] for name, all_ in found.items()}
        rates = {name: [turn.rate for turn in all_] for name, all_ in own.items()}
        for name, all_ in own.items():
            ratio = paired.ratio(rates[name], rates[next(iter(runs))])
            work = median(turn.work for turn in all_)
            cells = f"{median(rates[name]):.0f}", ratio, f"{work:.2f}"
            print(paired.row(LABELS[system], beside, at_once, name, *cells), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--busy", type=int, default=4, help="busy processes beside it; 0: none")
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--spins", type=int, nargs="*", default=[])
    parser.add_argument("--systems", nargs="+", choices=LABELS)
    parser.add_argument("--model", default="demo")
    args = parser.parse_args()
    for name in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY", "OMP_NUM_THREADS"):
        os.environ.pop(name, None)
    cores = usable_cores()
    settings = [Setting("plain", 300_000, cores)]
    settings += [Setting(f"{spins} spins", spins, cores) for spins in args.spins]
    settings += [Setting("1 thread", threads=1), Setting("now")]
    systems = args.systems or (list(LABELS) if args.model == "demo" else ["engine"])
    print(f"{cores} cores, load {os.getloadavg()[0]:.1f}; {args.turns} turns", flush=True)
    columns = ("system", "beside", "at once", "setting", "tokens/s", "ratio")
    print(paired.head(*columns, "CPU s / 1,000 tokens"), flush=True)
    for system in systems:
        with ExitStack() as started:
            runs = {
                setting.name: started.enter_context(
                    offline(args.model, setting)
                    if system == "engine"
                    else served(int(system), setting)
                )
                for setting in settings
            }
            measure(system, "nothing", runs, args.turns)
            if args.busy:
                with busy(args.busy):
                    measure(system, f"{args.busy} processes", runs, args.turns)


if __name__ == "__main__":
    main()
