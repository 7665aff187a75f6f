"""The report as one HTML page that needs no other host: plotly's plots, and tables."""

import json
from collections.abc import Iterable, Sequence
from html import escape
from math import exp
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from diffray.cluster.cli.evaluation.report import HEADINGS, NOTES, cells, front, remarks
from diffray.cluster.cli.evaluation.statistics import mean

if TYPE_CHECKING:
    from plotly.graph_objects import Figure

Json = dict[str, Any]
_BINS: Final = 10
_MOST_ROWS: Final = 60  # of a heat map
_MOST_SHOWN: Final = 40  # answers in a table
_STYLE: Final = """
body { font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 1200px; padding: 0 1rem }
table { border-collapse: collapse; margin: 1rem 0; font-variant-numeric: tabular-nums }
td, th { border-bottom: 1px solid #ddd; padding: .3rem .7rem; text-align: left }
td { vertical-align: top }
pre { margin: 0; white-space: pre-wrap; font-size: 12px }
"""


def page(found: Json, rows: Sequence[Json]) -> str:
    """Return the page of a summary and the rows it was made of."""
    parts = [f"<h1>{escape(found['facts']['model'])}</h1>", f"<p>{escape(_facts(found))}</p>"]
    named = ((name, json.dumps(options)) for name, options in found["policies"].items())
    parts.append(_table(("policy", "options"), named))
    script = True  # plotly's, once
    for task, made in found["tasks"].items():
        parts += [f"<h2>{escape(task)}</h2>", _table(HEADINGS, cells(made))]
        parts += [f"<p>{escape(line)}</p>" for line in remarks(made)]
        parts.append(_trade_off(made).to_html(full_html=False, include_plotlyjs=script))
        script = False
    parts += ["<h2>The order of unmasking</h2>", _ORDER]
    parts.append(_orders(rows).to_html(full_html=False, include_plotlyjs=False))
    parts += ["<h2>Calibration</h2>", _CALIBRATION]
    parts.append(_calibration(rows).to_html(full_html=False, include_plotlyjs=False))
    if different := _different(rows):
        parts += ["<h2>Questions that policies answered differently</h2>", different]
    body = "\n".join([*parts, f"<p>{escape(NOTES)}</p>"])
    title = escape(found["facts"]["model"])
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{title}</title>'
        f"<style>{_STYLE}</style><body>{body}</body></html>\n"
    )


_ORDER: Final = (
    "<p>Each line is an answer, each column a position; the colour is the step that made its token "
    "final, as a share of the answer's steps. Choose the policy in the menu.</p>"
)
_CALIBRATION: Final = (
    "<p>Answers by the mean probability of their tokens when these became final, and the share of "
    "right ones with its interval. On the diagonal, confidence equals accuracy.</p>"
)


def _facts(found: Json) -> str:
    return "; ".join(f"{name}: {value}" for name, value in found["facts"].items())


def _table(headings: Sequence[str], lines: Iterable[tuple[str, ...]]) -> str:
    head = "".join(f"<th>{escape(each)}</th>" for each in headings)
    body = "".join(
        f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in line)}</tr>" for line in lines
    )
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def _trade_off(made: Json) -> "Figure":
    """Return accuracy against tokens per forward, and against tokens per second."""
    from plotly.subplots import make_subplots

    figure = make_subplots(1, 2, shared_yaxes=True, horizontal_spacing=0.04)
    axes = {"tokens_per_forward": "tokens per forward", "tokens_per_second": "tokens per second"}
    for column, (speed, title) in enumerate(axes.items(), 1):
        best = front(made, speed)
        figure.add_scatter(
            x=[made[name][speed].value for name in best],
            y=[made[name]["accuracy"].value for name in best],
            mode="lines",
            line={"color": "#999", "dash": "dot"},
            name="Pareto front",
            showlegend=column == 1,
            row=1,
            col=column,
        )
        for place, (name, own) in enumerate(made.items()):
            x, y = own[speed], own["accuracy"]
            figure.add_scatter(
                x=[x.value],
                y=[y.value],
                error_x=_error(x) if x.known else None,
                error_y=_error(y),
                mode="markers",
                marker={"size": 9, "color": _COLOURS[place % len(_COLOURS)]},
                name=name,
                legendgroup=name,
                showlegend=column == 1,
                row=1,
                col=column,
            )
        figure.update_xaxes(title=title, rangemode="tozero", row=1, col=column)
    figure.update_yaxes(title="accuracy", tickformat=".0%", row=1, col=1)
    return figure.update_layout(height=460, template="plotly_white", margin={"t": 20})


_COLOURS: Final = "#1f77b4 #ff7f0e #2ca02c #d62728 #9467bd #8c564b #e377c2 #17becf #bcbd22".split()


def _error(value: Any) -> Json:
    """Return the error bar of an estimate."""
    up, down = value.high - value.value, value.value - value.low
    return {"type": "data", "symmetric": False, "array": [up], "arrayminus": [down], "thickness": 1}


def _by_policy(rows: Sequence[Json]) -> dict[str, list[Json]]:
    found: dict[str, list[Json]] = {}
    for row in rows:
        found.setdefault(row["policy"], []).append(row)
    return found


def _orders(rows: Sequence[Json]) -> "Figure":
    """Return a heat map of each policy, of which a menu shows one."""
    from plotly.graph_objects import Figure

    figure, buttons = Figure(), []
    policies = _by_policy(rows)
    for place, (name, own) in enumerate(policies.items()):
        shown = [row for row in own if row["steps"]][:_MOST_ROWS]
        width = max((len(row["steps"]) for row in shown), default=1)
        steps = np.full((len(shown), width), np.nan)
        for line, row in enumerate(shown):
            made = np.asarray(row["steps"], float)
            steps[line, : len(made)] = made / max(made.max(), 1)
        figure.add_heatmap(
            z=np.round(steps, 3),
            y=[f"{row['task']} {row['item']}" for row in shown],
            colorscale="Viridis",
            zmin=0,
            zmax=1,
            visible=place == 0,
        )
        visible = [other == place for other in range(len(policies))]
        buttons.append({"label": name, "method": "update", "args": [{"visible": visible}]})
    figure.update_layout(
        height=620,
        template="plotly_white",
        margin={"t": 40},
        updatemenus=[{"buttons": buttons, "x": 0, "xanchor": "left", "y": 1.08}],
        xaxis_title="position",
    )
    return figure.update_yaxes(autorange="reversed", showticklabels=False)


def _calibration(rows: Sequence[Json]) -> "Figure":
    """Return accuracy against confidence."""
    from plotly.graph_objects import Figure

    figure = Figure()
    ends = [0, 1]
    figure.add_scatter(x=ends, y=ends, mode="lines", line={"dash": "dot"}, name="calibrated")
    for place, (name, own) in enumerate(_by_policy(rows).items()):
        bins: dict[int, list[tuple[float, float]]] = {}
        for row in own:
            known = [each for each in row["logprobs"] if each is not None]
            if known:
                sure = float(np.mean([exp(each) for each in known]))
                bins.setdefault(min(int(sure * _BINS), _BINS - 1), []).append((sure, row["score"]))
        points = [
            (float(np.mean([s for s, _ in each])), mean([score for _, score in each]), len(each))
            for _, each in sorted(bins.items())
        ]
        figure.add_scatter(
            x=[sure for sure, _, _ in points],
            y=[found.value for _, found, _ in points],
            error_y={
                "type": "data",
                "symmetric": False,
                "array": [found.high - found.value for _, found, _ in points],
                "arrayminus": [found.value - found.low for _, found, _ in points],
                "thickness": 1,
            },
            text=[f"{count} answers" for _, _, count in points],
            mode="lines+markers",
            marker={"color": _COLOURS[place % len(_COLOURS)]},
            name=name,
        )
    figure.update_xaxes(title="confidence", range=[0, 1.02])
    figure.update_yaxes(title="accuracy", tickformat=".0%")
    return figure.update_layout(height=460, template="plotly_white", margin={"t": 20})


def _different(rows: Sequence[Json]) -> str:
    """Return a table of the questions with different scores, with the answers."""
    items: dict[tuple[str, str], dict[str, Json]] = {}
    for row in rows:
        if row["sample"] == 0:
            items.setdefault((row["task"], row["item"]), {})[row["policy"]] = row
    found: list[str] = []
    for (task, item), own in items.items():
        if len({row["score"] for row in own.values()}) < 2 or len(found) == _MOST_SHOWN:
            continue
        said: dict[tuple[str, float], list[str]] = {}
        for name, row in own.items():
            said.setdefault((row["text"], row["score"]), []).append(name)
        answers = "".join(
            f"<p>{escape(', '.join(names))}: {score:g}</p><pre>{escape(text)}</pre>"
            for (text, score), names in said.items()
        )
        first = next(iter(own.values()))
        prompt = escape(first["prompt"])
        answers += f"<p>expected</p><pre>{escape(str(first['expected']))}</pre>"
        found.append(
            f"<tr><td>{escape(task)} {escape(item)}<pre>{prompt}</pre></td><td>{answers}</td></tr>"
        )
    return f"<table><tbody>{''.join(found)}</tbody></table>" if found else ""
