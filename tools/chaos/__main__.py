"""Chaos under a checked workload: `python -m tools.chaos --faults 100 --streams 64 --seed 7`.

It serves a demo model with some replicas, asks questions whose answers it knows, and meanwhile
kills, stops, hangs and overloads what it can, one fault after the other, as the seed says. A second
server beside it is asked now and then. It ends with status 1 if an answer was lost, altered or
doubled, or came from the other server, if anything was left behind, or if more than one fault in
twenty took 15 s on a machine without other work (`--busy`).

`--terminal` is another run, of faults that end the server: each happens to one of its own.
"""

import argparse
import asyncio
import os
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path

from tools.chaos.faults import schedule
from tools.chaos.neighbour import next_door
from tools.chaos.report import as_text, passed, write
from tools.chaos.run import Outcome, storm
from tools.chaos.system import Layout, leftovers, running, shared_now
from tools.chaos.terminal import terminal
from tools.chaos.workload import questions
from tools.other_work import busy
from tools.signals import as_in_a_terminal


def chaos(
    layout: Layout,
    *,
    faults: int,
    streams: int,
    tokens: int,
    seed: int,
    minutes: float = 1e9,
    alone: bool = False,
) -> Outcome:
    """Serve, hurt, end; returns what was found."""
    asked = questions(layout.model, count=6, tokens=tokens, seed=seed)
    _say(f"{len(asked)} answers are known; starting {layout.replicas} replicas ...")
    with ExitStack() as stack:
        neighbour = None if alone else stack.enter_context(next_door())
        before = shared_now()
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        system = stack.enter_context(running(layout, folder))
        plan = schedule(faults, seed)
        outcome = asyncio.run(storm(system, asked, streams, plan, minutes, _say, neighbour))
        system.wake_all()
        outcome.leaks += leftovers(system.served, before)
    return outcome


def main() -> None:
    as_in_a_terminal()
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--faults", type=int, default=10)
    parser.add_argument("--minutes", type=float, default=1e9, help="after which no more come")
    parser.add_argument("--streams", type=int, default=12)
    parser.add_argument("--tokens", type=int, default=96, help="of an answer")
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--replicas", type=int, default=2)
    parser.add_argument("--ranks", type=int, default=1, help="of each replica")
    parser.add_argument("--prefix-routing", action="store_true", help="of a block-causal model")
    parser.add_argument("--busy", type=int, default=0, help="processes that want a core each")
    parser.add_argument("--alone", action="store_true", help="without a second server beside it")
    parser.add_argument("--terminal", action="store_true", help="the faults that end a server")
    parser.add_argument("--report", type=Path, help="a file: .html, .json or text")
    given = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    # One replica has room for all, while another is away.
    room = {"slots": given.streams, "queue": -(-given.streams // given.replicas)}
    layout = Layout(
        given.model, given.replicas, given.ranks, prefix_routing=given.prefix_routing, **room
    )
    if given.terminal:
        with busy(given.busy):
            endings = terminal(layout, given.seed, _say)
        sys.exit(0 if all(ending.passed for ending in endings) else 1)
    with busy(given.busy):
        outcome = chaos(
            layout,
            faults=given.faults,
            streams=given.streams,
            tokens=given.tokens,
            seed=given.seed,
            minutes=given.minutes,
            alone=given.alone,
        )
    outcome.busy = given.busy
    command = "python -m tools.chaos " + " ".join(sys.argv[1:])
    print(as_text(outcome, command))
    if given.report is not None:
        write(outcome, command, given.report)
    sys.exit(0 if passed(outcome) else 1)


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
