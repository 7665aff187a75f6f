"""What other work on the machine costs: `python -m benchmarks.busy`, the demo model on a CPU.

The engine in process, one server and two replicas, each started once for every setting and asked in
turns: on the machine as it is, and beside processes that keep every core busy. "plain" is the C
library's own waiting (300,000 looks for work) with a thread for each core in every rank; "now" is
what the package does by itself. `--spins` adds other numbers of looks, with as many threads;
`--model` measures another checkpoint, in process alone. Tokens per second, their ratio to "plain"
as the median over turns, and processor seconds of all processes for 1,000 tokens.
"""

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from benchmarks import load, paired
from benchmarks.serving import bodies
from diffray import DiffusionLLM, SamplingParams
from diffray.cluster.cli.bench.datasets import random_ids
from diffray.components.container import usable_cores
from tests.helpers.serve_process import ServeProcess, serve_process

TOKENS = 32
REQUESTS = {1: 4, 8: 16}  # of a turn, by how many are under way at once
TICKS = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, slots=True)
class Setting:
    """How threads wait, and how many each rank has; None: as the package decides."""

    name: str
    spins: int | None = None
    threads: int | None = None

    def variables(self) -> dict[str, str]:
        return {} if self.spins is None else {"GOMP_SPINCOUNT": str(self.spins)}


@dataclass(frozen=True, slots=True)
class Turn:
    rate: float  # tokens per second
    work: float  # processor seconds for 1,000 tokens


Ask = Callable[[int], Turn]  # some requests, so many at once


def work_offline(model: str, threads: int | None) -> None:
    """Be the engine: a turn for every number that comes, how long it took for an answer."""
    with DiffusionLLM(
        model, device="cpu", dtype="float32", max_num_seqs=max(REQUESTS), cpu_threads=threads
    ) as llm:
        if llm.tokenizer is None:
            prompts = random_ids(llm, max(REQUESTS.values()), 32, seed=7)
        else:
            asked = [body["messages"] for body in bodies(max(REQUESTS.values()), TOKENS)]
            prompts = [llm.tokenizer.encode_chat(messages) for messages in asked]
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
def offline(model: str, setting: Setting) -> Iterator[Ask]:
    command = [sys.executable, "-m", "benchmarks.busy", "--offline", model]
    if setting.threads is not None:
        command += ["--threads", str(setting.threads)]
    child = subprocess.Popen(
        command,
        env=os.environ | setting.variables(),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )

    def ask(at_once: int) -> Turn:
        assert child.stdin is not None and child.stdout is not None
        child.stdin.write(f"{at_once}\n")
        child.stdin.flush()
        seconds, work = json.loads(child.stdout.readline())
        tokens = REQUESTS[at_once] * TOKENS
        return Turn(tokens / seconds, work / tokens * 1000)

    try:
        yield ask
    finally:
        child.kill()
        child.wait()


@contextmanager
def served(replicas: int, setting: Setting) -> Iterator[Ask]:
    flags = ["demo", "--device", "cpu", "--dtype", "float32", "--replicas", str(replicas)]
    if setting.threads is not None:
        flags += ["--cpu-threads", str(setting.threads)]
    # As the command itself would say it; a server for tests has one thread.
    settings = setting.variables() | {"OMP_NUM_THREADS": str(max(usable_cores() // replicas, 1))}
    with serve_process(*flags, settings=settings) as running:
        running.wait_for("/v1", 1)

        def ask(at_once: int) -> Turn:
            before = _processor_seconds(running)
            rate = asyncio.run(_asked(running.url, at_once))
            work = _processor_seconds(running) - before
            return Turn(rate, work / (REQUESTS[at_once] * TOKENS) * 1000)

        yield ask


async def _asked(url: str, at_once: int) -> float:
    asked = [{"model": "demo"} | body for body in bodies(REQUESTS[at_once], TOKENS)]
    async with load.client(url) as http:
        begin = time.perf_counter()
        answers = await load.all_of(asked, at_once, partial(load.chat, http))
        return load.written(answers) / (time.perf_counter() - begin)


def _processor_seconds(running: ServeProcess) -> float:
    """Return what all its processes have used since they began."""
    ticks = 0
    for pid in running.processes():
        words = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        ticks += int(words[11]) + int(words[12])
    return ticks / TICKS


@contextmanager
def busy(count: int) -> Iterator[None]:
    """Run processes that always want a core."""
    others = [
        subprocess.Popen([sys.executable, "-c", "while True: pass"], start_new_session=True)
        for _ in range(count)
    ]
    try:
        yield
    finally:
        for other in others:
            other.kill()
            other.wait()


def measure(asks: dict[str, Ask], turns: int) -> dict[tuple[str, int], list[Turn]]:
    """Return each setting's turns, by how many requests were under way."""

    def contender(ask: Ask) -> Callable[[int], dict[int, Turn]]:
        return lambda _: {at_once: ask(at_once) for at_once in REQUESTS}

    found = paired.take_turns({name: contender(ask) for name, ask in asks.items()}, turns)
    return {
        (name, at_once): [turn[at_once] for turn in all_]
        for name, all_ in found.items()
        for at_once in REQUESTS
    }


def tell(system: str, beside: str, found: dict[tuple[str, int], list[Turn]], plain: str) -> None:
    for (name, at_once), turns in sorted(found.items(), key=lambda item: item[0][1]):
        rates = [turn.rate for turn in turns]
        ratio = paired.ratio(rates, [turn.rate for turn in found[plain, at_once]])
        rate, work = statistics.median(rates), statistics.median(turn.work for turn in turns)
        cells = system, beside, at_once, name, f"{rate:.0f}", ratio, f"{work:.2f}"
        print(paired.row(*cells), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--busy", type=int, default=4, help="processes beside it; 0: none")
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--spins", type=int, nargs="*", default=[])
    parser.add_argument("--systems", nargs="+", choices=("engine", "1", "2"), default=None)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--offline", help=argparse.SUPPRESS)
    parser.add_argument("--threads", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.offline:
        work_offline(args.offline, args.threads)
        return
    for name in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY", "OMP_NUM_THREADS"):
        os.environ.pop(name, None)
    cores = usable_cores()
    settings = [Setting("plain", 300_000, cores)]
    settings += [Setting(f"{spins} spins", spins, cores) for spins in args.spins]
    settings += [Setting("now")]
    systems = args.systems or (["engine", "1", "2"] if args.model == "demo" else ["engine"])
    print(f"{cores} cores, load {os.getloadavg()[0]:.1f}; {args.turns} turns", flush=True)
    columns = ("system", "beside", "at once", "setting", "tokens/s", "ratio")
    print(paired.head(*columns, "CPU s / 1,000 tokens"), flush=True)
    for system in systems:
        with ExitStack() as running:
            asks = {
                setting.name: running.enter_context(
                    offline(args.model, setting)
                    if system == "engine"
                    else served(int(system), setting)
                )
                for setting in settings
            }
            label = {"engine": "engine", "1": "one server", "2": "two replicas"}[system]
            tell(label, "nothing", measure(asks, args.turns), settings[0].name)
            if args.busy:
                with busy(args.busy):
                    found = measure(asks, args.turns)
                tell(label, f"{args.busy} processes", found, settings[0].name)


if __name__ == "__main__":
    main()
