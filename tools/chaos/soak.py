"""Hours in minutes: `python -m tools.chaos.soak --minutes 20 --report soak.json`.

The same checked clients as under chaos, and no faults: the memory of diffray's own processes must
be flat within 2 % after the warm-up, that of Ray's within 10 %, and the GCS's below a
bound; latency must not drift, and all pages must be back at the end. Ends with status 1 where that
does not hold.
"""

import argparse
import asyncio
import json
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

from diffray.cluster.cli.bench import percentile
from tools.chaos.run import Outcome, clients, pages_held
from tools.chaos.system import PARTS, Layout, System, leftovers, running, shared_now
from tools.chaos.workload import Question, questions

_EACH_S = 5.0  # between samples of the memory
WARM = 0.25  # of the time until the memory counts
FLAT = 0.02  # by which the memory of a rank, a coordinator or a replica may grow
FLAT_OTHERS = 0.1  # the same of Ray's processes
MOST_GCS = 512 << 20  # it remembers Ray's last 100,000 calls, and grows until it has seen as many
DRIFT = 0.1  # by which the second half's median latency may exceed the first's


@dataclass(slots=True)
class Soak:
    """What was seen, minute by minute."""

    outcome: Outcome = field(default_factory=Outcome)
    memory: dict[str, list[tuple[float, int]]] = field(default_factory=dict)  # minutes, bytes
    begin: float = 0.0

    def growth(self, part: str) -> float:
        """Return by how much the last quarter's median exceeds that after the warm-up."""
        sizes = [size for _, size in self.memory[part]]
        warm = sizes[int(WARM * len(sizes)) :]
        quarter = max(len(warm) // 4, 1)
        return percentile(warm[-quarter:], 50) / percentile(warm[:quarter], 50) - 1

    def drift(self) -> float:
        """Return by how much answers of the second half take longer than those of the first."""
        took = [seconds for _, seconds in self.outcome.tally.latencies]
        took = took[int(WARM * len(took)) :]
        half = len(took) // 2
        return percentile(took[half:], 50) / percentile(took[:half], 50) - 1 if half else 0.0

    def complaints(self) -> list[str]:
        found = [*self.outcome.tally.wrong, *self.outcome.leaks]
        for part in self.memory:
            if part == "gcs":
                most = max(size for _, size in self.memory[part])
                if most > MOST_GCS:
                    found.append(f"the gcs takes {most / 2**20:.0f} MiB")
            elif (grown := self.growth(part)) > (FLAT if part in PARTS else FLAT_OTHERS):
                found.append(f"the memory of the {part} has grown by {100 * grown:.1f} %")
        if (drift := self.drift()) > DRIFT:
            found.append(f"answers take {100 * drift:.1f} % longer than at first")
        return found


async def soak(system: System, asked: list[Question], streams: int, minutes: float) -> Soak:
    """Let clients ask for so long, and look at the memory meanwhile."""
    found = Soak(begin=time.monotonic())
    async with clients(system, asked, streams, found.outcome):
        while (now := time.monotonic() - found.begin) < 60 * minutes:
            for part, size in (await asyncio.to_thread(system.memory)).items():
                found.memory.setdefault(part, []).append((now / 60, size))
            await asyncio.sleep(min(_EACH_S, 60 * minutes - now))
    found.outcome.leaks = await pages_held(system) + system.leaks()
    return found


def run(layout: Layout, *, streams: int, tokens: int, minutes: float, seed: int) -> Soak:
    """Serve, soak, end."""
    asked = questions(layout.model, count=6, tokens=tokens, seed=seed)
    before = shared_now()
    with tempfile.TemporaryDirectory() as folder, running(layout, Path(folder)) as system:
        found = asyncio.run(soak(system, asked, streams, minutes))
        found.outcome.leaks += leftovers(system.served, before)
    return found


def as_text(found: Soak) -> str:
    """Return the memory and the latency, and what is wrong with them."""
    lines = [
        f"{part}: {sizes[-1][1] / 2**20:.0f} MiB at the end, {100 * found.growth(part):+.2f} % "
        "since the warm-up"
        for part, sizes in found.memory.items()
    ]
    counts = found.outcome.tally.counts
    lines.append(f"{counts['right']} of {counts['asked']} answers right")
    lines.append(f"latency drift: {100 * found.drift():+.1f} %")
    return "\n".join([*lines, *found.complaints(), "FAILED" if found.complaints() else "passed"])


def samples(found: Soak) -> str:
    """Return the memory and the latencies over time, as JSON."""
    took = [[(at - found.begin) / 60, s] for at, s in found.outcome.tally.latencies]
    return json.dumps({"minutes and bytes": found.memory, "minutes and seconds": took})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=20.0)
    parser.add_argument("--streams", type=int, default=12)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--replicas", type=int, default=1)
    parser.add_argument("--report", type=Path, help="a .json file: all samples; else text")
    given = parser.parse_args()
    room = -(-given.streams // given.replicas)
    layout = Layout(given.model, given.replicas, slots=room, queue=room)
    found = run(
        layout,
        streams=given.streams,
        tokens=given.tokens,
        minutes=given.minutes,
        seed=given.seed,
    )
    print(as_text(found))
    if given.report is not None:
        text = samples(found) if given.report.suffix == ".json" else as_text(found)
        given.report.write_text(text + "\n")
    sys.exit(1 if found.complaints() else 0)


if __name__ == "__main__":
    main()
