"""Chaos under a checked workload: `python -m benchmarks.chaos --faults 100 --streams 64 --seed 7`.

It serves a demo model with some replicas, asks questions whose answers it knows, and meanwhile
kills, stops, hangs and overloads what it can, one fault after the other, as the seed says. It ends
with status 1 if an answer was lost, altered or doubled, or anything was left behind.
"""

import argparse
import asyncio
import os
import sys
import tempfile
from pathlib import Path

from benchmarks.chaos.faults import schedule
from benchmarks.chaos.report import as_text, passed, write
from benchmarks.chaos.run import Outcome, storm
from benchmarks.chaos.system import Layout, leftovers, running, shared_now
from benchmarks.chaos.workload import questions


def chaos(
    layout: Layout, *, faults: int, streams: int, tokens: int, seed: int, minutes: float = 1e9
) -> Outcome:
    """Serve, hurt, end; returns what was found."""
    asked = questions(layout.model, count=6, tokens=tokens, seed=seed)
    _say(f"{len(asked)} answers are known; starting {layout.replicas} replicas ...")
    before = shared_now()
    with tempfile.TemporaryDirectory() as folder, running(layout, Path(folder)) as system:
        outcome = asyncio.run(storm(system, asked, streams, schedule(faults, seed), minutes, _say))
        system.wake_all()
        outcome.leaks += leftovers(system.served, before)
    return outcome


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--faults", type=int, default=10)
    parser.add_argument("--minutes", type=float, default=1e9, help="after which no more come")
    parser.add_argument("--streams", type=int, default=12)
    parser.add_argument("--tokens", type=int, default=96, help="of an answer")
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--replicas", type=int, default=2)
    parser.add_argument("--ranks", type=int, default=1, help="of each replica")
    parser.add_argument("--report", type=Path, help="a file: .html, .json or text")
    given = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    # One replica has room for all, while another is away.
    room = {"slots": given.streams, "queue": -(-given.streams // given.replicas)}
    layout = Layout(given.model, given.replicas, given.ranks, **room)
    outcome = chaos(
        layout,
        faults=given.faults,
        streams=given.streams,
        tokens=given.tokens,
        seed=given.seed,
        minutes=given.minutes,
    )
    command = "python -m benchmarks.chaos " + " ".join(sys.argv[1:])
    print(as_text(outcome, command))
    if given.report is not None:
        write(outcome, command, given.report)
    sys.exit(0 if passed(outcome) else 1)


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
