"""How late heartbeats are where nothing hangs: `python -m tools.chaos.alarms --minutes 5`.

A server answers streams, and now and then refuses a body that is as large as a body may be, while
other processes want all cores. The server logs each silence of more than a third of
`heartbeat_timeout_s`; this counts them, and what it took for hung. Ends with status 1 if there was
anything of the kind.
"""

import argparse
import asyncio
import json
import os
import re
import sys
import tempfile
import time
from itertools import cycle
from pathlib import Path

import httpx2

from tools.chaos.run import Outcome, clients
from tools.chaos.system import Layout, System, running
from tools.chaos.workload import Question, questions
from tools.other_work import busy

SILENT = re.compile(r"(the coordinator|rank \d+) was silent for ([\d.]+) s")
HUNG = re.compile(r"([^:\n]*) sent no heartbeat for .* assumed hung")
_EACH_S = 5.0  # between large bodies
_LARGE = 7 << 20  # bytes of one


async def load(system: System, asked: list[Question], streams: int, minutes: float) -> Outcome:
    """Ask for so long; the tally reports faults of the clients themselves."""
    outcome, end = Outcome(), time.monotonic() + 60 * minutes
    bodies = [
        json.dumps({"model": system.model, "prompt": prompt}, separators=(",", ":"))
        for prompt in ([7] * (_LARGE // 2), ["a"] * (_LARGE // 4), "word " * (_LARGE // 5))
    ]
    headers = {"Content-Type": "application/json"}
    async with (
        clients(system, asked, streams, outcome),
        httpx2.AsyncClient(base_url=system.served.url, timeout=120) as http,
    ):
        for body in cycle(bodies):
            if time.monotonic() > end:
                break
            answer = await http.post("/v1/completions", content=body, headers=headers)
            assert answer.status_code in (400, 413), answer.text[:200]
            await asyncio.sleep(_EACH_S)
    return outcome


def logged(folder: Path) -> str:
    """Return what all processes of a server have logged."""
    files = folder.glob("ray/session_2*/logs/worker-*.err")
    return "\n".join(file.read_text(errors="replace") for file in files)


def as_text(text: str, outcome: Outcome, loads: list[float]) -> str:
    """Return how often each was silent for how long."""
    found: dict[str, list[float]] = {}
    for name, seconds in SILENT.findall(text):
        found.setdefault(name, []).append(float(seconds))
    lines = [
        f"{name}: {len(each)} silences, the longest {max(each):.1f} s; "
        + ", ".join(f"{sum(s >= bound for s in each)} of {bound} s or more" for bound in (2, 3))
        for name, each in sorted(found.items())
    ]
    return "\n".join(
        [
            *(lines or ["no silence of more than a third of heartbeat_timeout_s"]),
            f"assumed hung: {', '.join(HUNG.findall(text)) or 'none'}",
            f"{outcome.tally.counts['right']} answers right, {len(outcome.tally.wrong)} wrong",
            f"load average {min(loads):.0f} to {max(loads):.0f}",
        ]
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=5.0)
    parser.add_argument("--busy", type=int, default=10, help="processes that want a core each")
    parser.add_argument("--streams", type=int, default=16)
    parser.add_argument("--ranks", type=int, default=1)
    given = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    layout = Layout(replicas=1, ranks=given.ranks, slots=given.streams, queue=given.streams)
    asked = questions(layout.model, count=6, tokens=96, seed=7)
    with tempfile.TemporaryDirectory() as name, running(layout, Path(name)) as system:
        with busy(given.busy):
            loads = [os.getloadavg()[0]]
            outcome = asyncio.run(load(system, asked, given.streams, given.minutes))
            loads.append(os.getloadavg()[0])
        text = logged(system.served.folder)
    print(as_text(text, outcome, loads))
    sys.exit(1 if HUNG.search(text) or outcome.tally.wrong else 0)


if __name__ == "__main__":
    main()
