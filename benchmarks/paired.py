"""One runner for all comparisons: contenders take turns at the same work, and ratios are of turns.

The first turn warms up and does not count. The order alternates from turn to turn, and a ratio is
the median over turns of one turn's two rates, so that other work on the machine slows both.
"""

import argparse
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from statistics import median
from typing import NamedTuple, TypeVar

T = TypeVar("T")


class Turn(NamedTuple):
    """What a contender wrote, token by token, in how many seconds; `work` is what else counts."""

    seconds: float
    answers: Sequence[Sequence[object]]
    work: float = 0.0  # forwards, or seconds of processors, as the comparison says

    @property
    def tokens(self) -> int:
        return sum(map(len, self.answers))

    @property
    def rate(self) -> float:
        return self.tokens / self.seconds


class Clock(NamedTuple):
    """`read` returns the seconds; `said` names threads and seconds in a heading."""

    read: Callable[[], float]
    said: str

    def timed(self, act: Callable[[int], Sequence[Sequence[object]]]) -> Callable[[int], Turn]:
        """Return a contender that takes a turn's number and is timed."""

        def take(number: int) -> Turn:
            begin = self.read()
            answers = act(number)
            return Turn(self.read() - begin, answers)

        return take


def parser(doc: str | None, *, turns: int, seed: int = 1) -> argparse.ArgumentParser:
    """Return a parser with what all comparisons in one process are told."""
    import torch

    made = argparse.ArgumentParser(description=(doc or "").partition("\n")[0])
    made.add_argument("--repeats", type=int, default=turns, help="turns, after one that warms up")
    made.add_argument("--seed", type=int, default=seed)
    made.add_argument("--threads", type=int, default=torch.get_num_threads())
    made.add_argument("--cpu-time", action="store_true", help="for a busy machine: one thread")
    return made


def clock_of(args: argparse.Namespace) -> Clock:
    """Give torch as many threads as were asked for, and return the clock."""
    import torch

    if args.cpu_time:  # idle threads spin, and their time would count
        torch.set_num_threads(1)
        return Clock(time.process_time, "1 threads, processor seconds")
    torch.set_num_threads(args.threads)
    return Clock(time.perf_counter, f"{args.threads} threads, wall clock seconds")


def take_turns(
    contenders: Mapping[str, Callable[[int], T]],
    turns: int,
    *,
    tell: Callable[[T], str] | None = None,
) -> dict[str, list[T]]:
    """Return each contender's turns; each is told the turn's number, 0 for the one that warms."""
    found: dict[str, list[T]] = {name: [] for name in contenders}
    for number in range(turns + 1):
        for name in contenders if number % 2 else reversed(list(contenders)):
            turn = contenders[name](number)
            if tell is not None:
                print(f"{name}: {tell(turn)}{'' if number else ', warming'}", file=sys.stderr)
            if number:
                found[name].append(turn)
    return found


def ratio(ours: Sequence[float], theirs: Sequence[float]) -> str:
    """Return the median over turns of one turn's two rates, with its range."""
    found = sorted(mine / other for mine, other in zip(ours, theirs, strict=True))
    return f"{median(found):.2f} ({found[0]:.2f} to {found[-1]:.2f})"


def rates(turns: Sequence[Turn]) -> list[float]:
    return [turn.rate for turn in turns]


def rate(turns: Sequence[Turn]) -> str:
    return f"{median(rates(turns)):.1f}"


def equal_answers(mine: Turn, other: Turn) -> str:
    """Return how many answers have the same tokens, of all."""
    same = sum(a == b for a, b in zip(mine.answers, other.answers, strict=True))
    return f"{same}/{len(mine.answers)}"


def equal_tokens(mine: Turn, other: Turn) -> str:
    """Return at how many places two turns' answers have the same token, of all."""
    rows = zip(mine.answers, other.answers, strict=True)
    same = sum(a == b for row, theirs in rows for a, b in zip(row, theirs, strict=False))
    return f"{same}/{mine.tokens}"


def row(*cells: object) -> str:
    return f"| {' | '.join(map(str, cells))} |"


def head(*cells: str) -> str:
    return f"{row(*cells)}\n{row(*['---'] * len(cells)).replace(' ', '')}"
