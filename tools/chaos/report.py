"""What a run has found, as text, JSON or a page."""

import json
from collections.abc import Sequence
from dataclasses import asdict
from html import escape
from pathlib import Path
from typing import Any

from diffray.cluster.cli.bench import percentile
from tools.chaos.run import Outcome

Row = tuple[str, ...]

HEAD: Row = ("fault", "times", "p50 s", "p95 s", "longest s")
LIMIT_S = 15.0  # within which all clients are sent tokens again after 95 of 100 faults
_BAD = ("lost", "altered", "duplicated", "mixed", "rude")


def sound(outcome: Outcome) -> bool:
    """Whether no answer was lost, altered, doubled or another server's, and nothing leaked."""
    return not outcome.tally.wrong and not outcome.leaks


def passed(outcome: Outcome) -> bool:
    """Whether the run was sound, and the server recovered in time unless it was short of cores."""
    healed = [hit.recovered or 0.0 for hit in outcome.hits]
    return sound(outcome) and (outcome.busy > 0 or not healed or _p(healed, 95) < LIMIT_S)


def recoveries(outcome: Outcome) -> list[Row]:
    """Return a line for each kind of fault, one for all, and one for the wait without a fault."""
    by_kind: dict[str, list[float]] = {"nothing": outcome.calm}
    for hit in outcome.hits:
        by_kind.setdefault(hit.fault.kind, []).append(hit.recovered or 0.0)
    found = [(kind, each) for kind, each in sorted(by_kind.items()) if each]
    if outcome.hits:
        found.append(("all faults", [hit.recovered or 0.0 for hit in outcome.hits]))
    return [
        (kind, str(len(each)), *(f"{n:.1f}" for n in (_p(each, 50), _p(each, 95), max(each))))
        for kind, each in found
    ]


def as_text(outcome: Outcome, command: str) -> str:
    """Return the report for a terminal."""
    rows = [HEAD, *recoveries(outcome)]
    widths = [max(len(row[at]) for row in rows) for at in range(len(HEAD))]
    lines = [command, ""]
    for row in rows:
        cells = (cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True))
        lines.append("  ".join([row[0].ljust(widths[0]), *cells]))
    lines += ["", *(f"{name}: {count}" for name, count in facts(outcome).items())]
    lines += ["", *outcome.tally.wrong[:50], *(f"leaked: {leak}" for leak in outcome.leaks)]
    lines.append("passed" if passed(outcome) else "FAILED")
    if sound(outcome) and not passed(outcome):
        lines.append(f"the p95 of all faults is not below {LIMIT_S:g} s")
    return "\n".join(lines)


def facts(outcome: Outcome) -> dict[str, Any]:
    """Return the counts, the bad ones even where they are none."""
    counts = outcome.tally.counts
    seconds = [took for _, took in outcome.tally.latencies]
    return {
        "requests": counts["asked"],
        "right": counts["right"],
        "of a batch": counts["of the batch"],
        "cut by the fault, asked again": counts["cut"],
        "refused, asked again": counts["refused"],
        "answers of the server next door": counts["asked next door"],
        **{name: counts[name] for name in _BAD},
        "leaks": len(outcome.leaks),
        "busy processes beside it": outcome.busy,
        "seconds": round(outcome.seconds, 1),
        "latency p50 s": round(_p(seconds, 50), 2),
        "latency p95 s": round(_p(seconds, 95), 2),
    }


def write(outcome: Outcome, command: str, path: Path) -> None:
    """Write the report: JSON or HTML by the file's name, else text."""
    if path.suffix == ".json":
        hits = [asdict(hit) for hit in outcome.hits]
        value = {"command": command, "facts": facts(outcome), "hits": hits, "calm": outcome.calm}
        text = json.dumps(value | {"wrong": outcome.tally.wrong, "leaks": outcome.leaks}, indent=1)
    elif path.suffix == ".html":
        text = _page(outcome, command)
    else:
        text = as_text(outcome, command)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text + "\n")


def _page(outcome: Outcome, command: str) -> str:
    def table(rows: Sequence[Row]) -> str:
        cells = ("".join(f"<td>{escape(cell)}</td>" for cell in row) for row in rows)
        return "<table>" + "".join(f"<tr>{row}</tr>" for row in cells) + "</table>"

    hits = [
        (
            str(hit.fault.number + 1),
            f"{hit.at - outcome.hits[0].at:.1f}",
            f"{hit.fault.kind} {hit.told}",
            f"{hit.recovered or 0.0:.1f}",
        )
        for hit in outcome.hits
    ]
    counts = [(name, str(count)) for name, count in facts(outcome).items()]
    wrong = [(line,) for line in (*outcome.tally.wrong, *outcome.leaks)]
    style = "body{font-family:sans-serif;margin:2em}td{padding:.1em 1em .1em 0}"
    return (
        f"<!doctype html><meta charset=utf-8><title>Chaos</title><style>{style}</style>"
        f"<h1>{'Passed' if passed(outcome) else 'Failed'}</h1><pre>{escape(command)}</pre>"
        f"<h2>Recovery</h2>{table([HEAD, *recoveries(outcome)])}"
        f"<h2>Counts</h2>{table(counts)}<h2>Wrong</h2>{table(wrong)}"
        f"<h2>Faults</h2>{table([('number', 'at s', 'fault', 'recovered s'), *hits])}"
    )


def _p(values: list[float], percent: float) -> float:
    return percentile(values, percent)
