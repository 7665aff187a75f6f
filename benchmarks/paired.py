"""Runs all comparisons: contenders take turns at the same work, and ratios compare turns.

The first turn warms up and does not count. The order alternates from turn to turn, and a ratio is
the median over turns of one turn's two rates, so that other work on the machine slows both.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from statistics import median
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias, TypeVar

if TYPE_CHECKING:  # torch takes seconds to import, and some comparisons run without it
    from diffray import DiffusionLLM, SamplingParams

T = TypeVar("T")
# What a column makes of a contender's turns and the first contender's.
Column: TypeAlias = tuple[str, Callable[[Sequence[T], Sequence[T]], object]]


class Answers(NamedTuple):
    """The tokens of each answer, and its number of forwards if they are counted."""

    rows: Sequence[Sequence[object]]
    forwards: Sequence[int] = ()


class Turn(NamedTuple):
    """The answers of one turn, and the seconds that they took."""

    seconds: float
    rows: Sequence[Sequence[object]]
    forwards: Sequence[int] = ()

    @property
    def tokens(self) -> int:
        return sum(map(len, self.rows))

    @property
    def rate(self) -> float:
        return self.tokens / self.seconds


class Clock(NamedTuple):
    """`read` returns the seconds; `label` names threads and seconds in a heading."""

    read: Callable[[], float]
    label: str = ""

    def timed(self, act: Callable[[int], Answers]) -> Callable[[int], Turn]:
        """Return a contender that times its turns; `act` takes a turn's number."""

        def take(number: int) -> Turn:
            begin = self.read()
            answers = act(number)
            return Turn(self.read() - begin, *answers)

        return take


def parser(doc: str | None, *, turns: int) -> argparse.ArgumentParser:
    """Return a parser with the options of all comparisons in one process."""
    import torch

    made = argparse.ArgumentParser(description=(doc or "").partition("\n")[0])
    made.add_argument("--repeats", type=int, default=turns, help="turns, after one that warms up")
    made.add_argument("--seed", type=int, default=1)
    made.add_argument("--threads", type=int, default=torch.get_num_threads())
    made.add_argument("--cpu-time", action="store_true", help="for a busy machine: one thread")
    return made


def clock_of(args: argparse.Namespace) -> Clock:
    """Set torch's threads as the options say, and return the clock."""
    import torch

    if args.cpu_time:  # idle threads spin, and their time would count
        torch.set_num_threads(1)
        return Clock(time.process_time, "1 threads, processor seconds")
    torch.set_num_threads(args.threads)
    return Clock(time.perf_counter, f"{args.threads} threads, wall clock seconds")


def generate(
    llm: "DiffusionLLM",
    prompts: Sequence[list[int]],
    params: "Sequence[SamplingParams]",
    *,
    at_once: bool = True,
) -> Answers:
    """Answer the prompts together, or one by one."""
    pairs = zip(prompts, params, strict=True)
    calls = [(prompts, params)] if at_once else [([prompt], [own]) for prompt, own in pairs]
    found = [row for call in calls for row in llm.generate(*call, use_tqdm=False)]
    return Answers([row.outputs[0].token_ids for row in found], [row.forwards for row in found])


@contextmanager
def answering(command: list[str], variables: Mapping[str, str]) -> Iterator[Callable[[Any], Any]]:
    """Run a program that answers JSON lines with JSON lines; yield a function that asks it."""
    process = subprocess.Popen(
        command,
        env=os.environ | variables,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdin is not None and process.stdout is not None
    stdin, stdout = process.stdin, process.stdout

    def send(given: Any) -> Any:
        with suppress(BrokenPipeError):
            print(json.dumps(given), file=stdin, flush=True)
        if not (line := stdout.readline()):
            raise ValueError(f"{' '.join(command)} has ended; its output is above")
        return json.loads(line)

    try:
        yield send
    finally:
        process.kill()
        process.wait()


def take_turns(
    contenders: Mapping[str, Callable[[int], T]],
    turns: int,
    *,
    describe: Callable[[T], str] | None = None,
) -> dict[str, list[T]]:
    """Return each contender's turns; a contender gets the turn's number, 0 for the warm-up."""
    found: dict[str, list[T]] = {name: [] for name in contenders}
    for number in range(turns + 1):
        for name in contenders if number % 2 else reversed(list(contenders)):
            turn = contenders[name](number)
            if describe is not None:
                print(f"{name}: {describe(turn)}{'' if number else ', warming'}", file=sys.stderr)
            if number:
                found[name].append(turn)
    return found


def ratio(ours: Sequence[float], theirs: Sequence[float]) -> str:
    """Return the median over turns of one turn's two rates, with its range."""
    found = sorted(mine / other for mine, other in zip(ours, theirs, strict=True))
    return f"{median(found):.2f} ({found[0]:.2f} to {found[-1]:.2f})"


def speedup(ours: Sequence[Turn], theirs: Sequence[Turn]) -> str:
    return ratio([turn.rate for turn in ours], [turn.rate for turn in theirs])


def rate(turns: Sequence[Turn]) -> str:
    return f"{median(turn.rate for turn in turns):.1f}"


def equal_answers(mine: Sequence[T], other: Sequence[T]) -> str:
    """Return how many answers are equal, out of all."""
    return f"{sum(a == b for a, b in zip(mine, other, strict=True))}/{len(mine)}"


def equal_tokens(mine: Sequence[Turn], other: Sequence[Turn]) -> str:
    """Return how many tokens of the last turn's answers are equal, out of all."""
    rows = zip(mine[-1].rows, other[-1].rows, strict=True)
    same = sum(a == b for row, theirs in rows for a, b in zip(row, theirs, strict=False))
    return f"{same}/{mine[-1].tokens}"


def table(first: str, found: Mapping[str, Sequence[T]], columns: Iterable[Column[T]]) -> str:
    """Return a row for each contender; the first one's turns are what it is compared with."""
    base, columns = next(iter(found.values())), [*columns]
    rows = [row(name, *(cell(turns, base) for _, cell in columns)) for name, turns in found.items()]
    return "\n".join([head(first, *(name for name, _ in columns)), *rows])


def figures(names: Iterable[str]) -> list[Column[Mapping[str, float]]]:
    """Return two columns for each number of a turn: its median, and its ratio to the first's."""

    def read(name: str, turns: Sequence[Mapping[str, float]]) -> list[float]:
        return [turn[name] for turn in turns]

    def middle(name: str, turns: Sequence[Mapping[str, float]], _: object) -> str:
        found = median(read(name, turns))
        return f"{found:.0f}" if found >= 100 else f"{found:.3g}"

    def to_first(
        name: str, turns: Sequence[Mapping[str, float]], base: Sequence[Mapping[str, float]]
    ) -> str:
        return ratio(read(name, turns), read(name, base))

    pairs = [((name, partial(middle, name)), ("ratio", partial(to_first, name))) for name in names]
    return [column for pair in pairs for column in pair]


def row(*cells: object) -> str:
    return f"| {' | '.join(map(str, cells))} |"


def head(*cells: str) -> str:
    return f"{row(*cells)}\n{row(*['---'] * len(cells)).replace(' ', '')}"
