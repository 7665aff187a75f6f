"""The summary of an evaluation: for each policy and task its accuracy, its speed, and how both
compare with those of the first policy on the same questions."""

import json
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final

from diffray.cluster.cli.evaluation.policies import NamedPolicy
from diffray.cluster.cli.evaluation.statistics import (
    Estimate,
    covered,
    difference,
    mean,
    p_value,
    pass_at,
    ratio,
)
from diffray.cluster.cli.evaluation.tasks import ALL

Json = dict[str, Any]
Rows = Sequence[Json]


def scores_of(rows: Rows) -> dict[tuple[str, str], float]:
    """Return each question's score, the mean of its samples'."""
    found: dict[tuple[str, str], list[float]] = defaultdict(list)
    for row in rows:
        found[row["task"], row["item"]].append(row["score"])
    return {name: sum(each) / len(each) for name, each in found.items()}


def summarize(rows: Rows, first: Rows, concurrency: int) -> Json:
    """Return the numbers of one policy's answers, beside the first policy's to the same task."""
    scores, base = scores_of(rows), scores_of(first)
    tokens, forwards = ([each for each in column] for column in _columns(rows))
    spans = [(row["began"], row["began"] + row["seconds"]) for row in rows]
    seconds = covered(spans)
    rate = sum(tokens) / max(seconds, 1e-9)
    found: Json = {
        "items": len(scores),
        "accuracy": mean(list(scores.values())),
        "tokens": sum(tokens),
        "forwards": sum(forwards),
        "seconds": seconds,
        "tokens_per_forward": ratio(tokens, forwards),
        "tokens_per_second": Estimate(rate, rate, rate),
        "empty": sum(not row["text"] for row in rows),
        "cut_off": sum(row["finish_reason"] == "length" for row in rows),
    }
    if concurrency == 1:  # else requests share the time
        found["tokens_per_second"] = ratio(tokens, [row["seconds"] for row in rows])
    if passed := passes(rows):
        found["pass_at"] = passed
    both = [name for name in scores if name in base]
    if rows is not first and both:
        pairs = [base[name] for name in both], [scores[name] for name in both]
        found["to_first"] = {
            "difference": difference(*pairs),
            "p": p_value(*pairs),
            "equal_answers": _equal(rows, first),
            "pairs": len(both),
        }
    return found


def passes(rows: Rows) -> dict[int, float]:
    """Return pass@1 and pass@k of k samples; nothing of one sample, or of scores in between."""
    found: dict[tuple[str, str], list[float]] = defaultdict(list)
    for row in rows:
        found[row["task"], row["item"]].append(row["score"])
    most = max(map(len, found.values()))
    if most == 1 or not all(row["score"] in (0, 1) for row in rows):
        return {}
    whole = [each for each in found.values() if len(each) == most]
    return {
        k: sum(pass_at(k, each.count(1), most) for each in whole) / len(whole) for k in (1, most)
    }


def _columns(rows: Rows) -> Iterator[Iterable[float]]:
    yield (len(row["tokens"]) for row in rows)
    yield (row["forwards"] for row in rows)


def _equal(rows: Rows, first: Rows) -> float:
    """Return the share of answers with the same text."""
    texts = {(row["task"], row["item"], row["sample"]): row["text"] for row in first}
    names = [(row["task"], row["item"], row["sample"]) for row in rows]
    same = [texts[n] == row["text"] for n, row in zip(names, rows, strict=True) if n in texts]
    return same.count(True) / max(len(same), 1)


def report(policies: Sequence[NamedPolicy], rows: Rows, facts: Json) -> Json:
    """Return the summary of a whole evaluation; the first policy is what others compare with."""
    tasks = list(dict.fromkeys(row["task"] for row in rows))
    found: Json = {"facts": facts, "policies": {}, "tasks": {}}
    for policy in policies:
        options = policy.request | ({"engine": policy.engine} if policy.engine else {})
        found["policies"][policy.name] = options
    for task in [*tasks, *([ALL] if len(tasks) > 1 else [])]:
        own = {
            policy.name: [
                row for row in rows if row["policy"] == policy.name and task in (ALL, row["task"])
            ]
            for policy in policies
        }
        own = {name: each for name, each in own.items() if each}
        first = next(iter(own.values()))
        made = {name: summarize(each, first, facts["concurrency"]) for name, each in own.items()}
        for name in front(made, "tokens_per_second"):
            made[name]["on_front"] = True
        found["tasks"][task] = made
    return found


def front(made: dict[str, Json], speed: str) -> list[str]:
    """Return the policies than which none is both more accurate and faster, slowest first."""
    by_speed = sorted(made, key=lambda name: (-made[name][speed].value, -made[name]["accuracy"][0]))
    found: list[str] = []
    for name in by_speed:
        if not found or made[name]["accuracy"].value > made[found[-1]]["accuracy"].value:
            found.append(name)
    return found[::-1]


HEADINGS: Final = (
    "policy", "items", "accuracy", "difference to the first", "p", "equal texts",
    "tokens per forward", "tokens/s", "faster",
)  # fmt: skip


def cells(made: dict[str, Json]) -> Iterator[tuple[str, ...]]:
    """Yield the rows of a task's table."""
    base = next(iter(made.values()))["tokens_per_second"].value
    for name, own in made.items():
        to_first = own.get("to_first")
        yield (
            f"{name} *" if own.get("on_front") and len(made) > 1 else name,
            str(own["items"]),
            _percent(own["accuracy"]),
            _points(to_first["difference"]) if to_first else "",
            f"{to_first['p']:.3f}" if to_first else "",
            f"{to_first['equal_answers']:.0%}" if to_first else "",
            _number(own["tokens_per_forward"], 2),
            _number(own["tokens_per_second"], 1),
            f"{own['tokens_per_second'].value / max(base, 1e-9):.2f}" if to_first else "",
        )


def _percent(value: Estimate) -> str:
    return f"{value.value:.1%} ({value.low:.1%} to {value.high:.1%})"


def _points(value: Estimate) -> str:
    low, high = (f"{100 * end:+.1f}" for end in value[1:])
    return f"{100 * value.value:+.1f} points ({low} to {high})"


def _number(value: Estimate, digits: int) -> str:
    low, high = (f"{end:.{digits}f}" for end in value[1:])
    return f"{value.value:.{digits}f}" + (f" ({low} to {high})" if value.known else "")


NOTES: Final = (
    "Intervals are of 95 %: Wilson's for accuracy, Tango's for differences of pairs; p is that of "
    "the paired test (McNemar's for right and wrong). * All faster policies are less accurate. "
    "Tokens are those before the end token, seconds those in which requests ran."
)


def markdown(found: Json) -> str:
    """Return the summary's tables."""
    facts = "; ".join(f"{name}: {value}" for name, value in found["facts"].items())
    parts = [f"# {found['facts']['model']}", facts]
    for task, made in found["tasks"].items():
        parts += [f"## {task}", as_table(HEADINGS, cells(made))]
        parts += remarks(made)
    return "\n\n".join([*parts, NOTES]) + "\n"


def remarks(made: dict[str, Json]) -> Iterator[str]:
    """Yield each policy's pass@k, and what is suspicious about its answers."""
    for name, own in made.items():
        said = [f"pass@{k} {value:.1%}" for k, value in own.get("pass_at", {}).items()]
        if own["empty"]:
            said.append(f"{own['empty']} empty answers")
        if own["cut_off"]:
            said.append(f"{own['cut_off']} answers cut off by max_tokens")
        if said:
            yield f"{name}: {', '.join(said)}"


def as_table(headings: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    """Return a table in Markdown."""
    every = [headings, ["---"] * len(headings), *lines]
    return "\n".join(f"| {' | '.join(cell.replace('|', '/') for cell in line)} |" for line in every)


def as_json(found: Json) -> str:
    """Return the summary as JSON, in which an estimate is [value, low, high]."""
    return json.dumps(found, indent=1, ensure_ascii=False) + "\n"


def write_report(out: Path, found: Json) -> None:
    (out / "summary.json").write_text(as_json(found))
    (out / "summary.md").write_text(markdown(found))
