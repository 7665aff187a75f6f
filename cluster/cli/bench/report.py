"""A benchmark as one HTML file: what ran where, the tables, the plots."""

from collections.abc import Mapping, Sequence
from html import escape

from diffray.cluster.cli.bench import charts
from diffray.cluster.cli.bench.offline import Looked
from diffray.cluster.cli.bench.output import COLUMNS, cells
from diffray.cluster.cli.bench.phases import MEANINGS
from diffray.cluster.cli.bench.serving import SWEEP, TaskRun, sweep_cells
from diffray.cluster.cli.bench.serving_result import printed

_STYLE = """
body{font:15px/1.5 system-ui,sans-serif;margin:2em auto;max-width:60em;padding:0 1em;
background:#fff;color:#1c2733}
h1{font-size:1.5em} h2{font-size:1.15em;margin-top:2em}
table{border-collapse:collapse} td,th{padding:.25em .8em;border-bottom:1px solid #d5dce3;
text-align:right;white-space:nowrap} td:first-child,th:first-child{text-align:left}
th{white-space:normal;vertical-align:bottom} div.wide table{font-size:.9em}
div.wide td,div.wide th{padding:.25em .5em}
table.facts td{white-space:normal;text-align:left} div.wide{overflow-x:auto}
svg{max-width:100%;height:auto} svg text{font:12px system-ui,sans-serif;fill:#1c2733}
svg .rule{stroke:#e2e7ec} pre{background:#f4f6f8;padding:1em;overflow-x:auto}
.legend span{margin-right:1.2em} .legend i{display:inline-block;width:.8em;height:.8em;
margin-right:.4em} p.note{color:#51606e;max-width:46em}
"""
_COUNTING = (
    "Tokens are those before the first end token (all, where end tokens are ignored), and the time "
    "includes the prompts'. Tokens per forward are a sequence's own, averaged over sequences; "
    "forwards that sequences share count once in forwards/s."
)
_ROOFLINE = (
    "The share of the roofline is the time that the measured memory bandwidth needs for the bytes "
    "that a step must read (weights that tokens touch, K/V that a window sees and does not run), "
    "of the time that a step takes. Weights that fit into a cache are read faster than memory "
    "allows."
)


def latency_report(facts: Mapping[str, str], sizes: Sequence[int], found: Sequence[Looked]) -> str:
    """Return the page of `diffray bench latency`."""
    points = [
        (looked.run.tokens_per_second, looked.run.seconds / len(looked.run.latencies), str(size))
        for size, looked in zip(sizes, found, strict=True)
    ]
    return _page(
        "Latency of batches",
        facts,
        _numbers("batch", found),
        _section(
            "Throughput and latency",
            charts.curve([charts.Line("batch size", points)], "tokens/s", "seconds per batch"),
        ),
        _split(found),
    )


def throughput_report(facts: Mapping[str, str], found: Sequence[Looked]) -> str:
    """Return the page of `diffray bench throughput`."""
    rows = [(looked.run.name, looked.run.tokens_per_forward) for looked in found]
    return _page(
        "Throughput",
        facts,
        _numbers("task", found),
        _section("Tokens per forward by task", charts.bars(rows, "tokens per forward")),
        _split(found),
    )


def serving_report(
    facts: Mapping[str, str], asked: Mapping[str, str], found: Sequence[TaskRun]
) -> str:
    """Return the page of `diffray bench serve`."""
    sections = [
        _section("Runs", _table(SWEEP, [sweep_cells(run) for run in found]) + _failures(found))
    ]
    if good := [run for run in found if run.served.result["completed"]]:
        sections += [_served_curve(good), _served_steps(good), _served_split(found)]
    sections += [
        _section(
            f"{run.task}, run {number}", f"<pre>{escape(chr(10).join(printed(run.served)))}</pre>"
        )
        for number, run in enumerate(found, 1)
    ]
    told = {f"requests of {run.task}": run.asked for run in found}
    return _page("Serving", {**facts, "model": found[0].model, **asked, **told}, *sections)


def _failures(found: Sequence[TaskRun]) -> str:
    """Return a line for each run with failures."""
    failures = [(number, run.failures) for number, run in enumerate(found, 1)]
    return "".join(_note(f"Run {number}: {told}") for number, told in failures if told)


def _served_curve(found: Sequence[TaskRun]) -> str:
    lines: dict[str, list[tuple[float, float, str]]] = {}
    for run in found:
        load, result = run.served.load, run.served.result
        label = f"{load.rate:g}/s" if load.concurrency is None else f"{load.concurrency}"
        point = result["output_throughput"], run.served.spreads["e2el"].median, label
        lines.setdefault(run.task, []).append(point)
    curve = charts.curve(
        [charts.Line(task, points) for task, points in lines.items()],
        "output tokens/s",
        "median end-to-end latency, ms",
    )
    return _section(
        "Throughput and latency",
        curve + _note("A point's label is its concurrency, or its rate where none was set."),
    )


def _served_steps(found: Sequence[TaskRun]) -> str:
    steps = {
        run.task: run.served.load.diffusion.committed_per_step
        for run in found
        if run.served.load.diffusion is not None
    }
    if not steps:
        return _section("Tokens per forward", _note("The server's /metrics tell nothing of it."))
    return _section(
        "Tokens per forward by task",
        charts.bars(list(steps.items()), "tokens per denoising step"),
    )


def _served_split(found: Sequence[TaskRun]) -> str:
    """Return how long rank 0 worked, for servers that tell; the rest of the time it had nothing."""
    rows = []
    for number, run in enumerate(found, 1):
        load = run.served.load
        if load.rank is not None:
            work, wait = load.rank.work / load.seconds, load.rank.wait / load.seconds
            shares = {"in rounds": work, "waiting for the next round": wait}
            rows.append((f"run {number}", shares | {"no work": max(0.0, 1 - work - wait)}))
    if not rows:
        return _section("Time split", _note("The server's /metrics do not tell it."))
    return _section("Time split of rank 0", charts.stacked(rows))


def _numbers(what: str, found: Sequence[Looked]) -> str:
    rows = [[looked.run.name, *cells(looked)] for looked in found]
    table = _table((what, *COLUMNS), rows)
    return _section("Numbers", table + _note(_COUNTING) + _note(_ROOFLINE))


def _split(found: Sequence[Looked]) -> str:
    plot = charts.stacked([(looked.run.name, looked.shares) for looked in found])
    phases = list(found[0].split)
    rows = [
        [looked.run.name]
        + [f"{1e3 * looked.split[p] / max(looked.split_forwards, 1):.2f}" for p in phases]
        + [f"{1e3 * looked.watched_step_seconds:.2f}", f"{looked.bytes_per_step / 1e6:.1f}"]
        for looked in found
    ]
    head = ("", *(f"{phase} ms" for phase in phases), "watched step ms", "MB read a step")
    meaning = "; ".join(f"{phase}: {MEANINGS[phase]}" for phase in phases)
    return _section(
        "Time split",
        plot + _table(head, rows) + _note(f"Per step, in a run of its own. {meaning}."),
    )


def _page(title: str, facts: Mapping[str, str], *sections: str) -> str:
    rows = "".join(
        f"<tr><td>{escape(name)}</td><td>{escape(value)}</td></tr>" for name, value in facts.items()
    )
    body = f'<h1>{escape(title)}</h1><table class="facts">{rows}</table>{"".join(sections)}'
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8"/>'
        '<meta name="viewport" content="width=device-width"/>'
        f"<title>diffray: {escape(title)}</title><style>{_STYLE}</style></head>"
        f"<body>{body}</body></html>\n"
    )


def _section(title: str, content: str) -> str:
    return f"<section><h2>{escape(title)}</h2>{content}</section>"


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    top = "".join(f"<th>{escape(cell)}</th>" for cell in head)
    lines = "".join(
        "<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows
    )
    return f'<div class="wide"><table><tr>{top}</tr>{lines}</table></div>'


def _note(text: str) -> str:
    return f'<p class="note">{escape(text)}</p>'
