"""Rates, paired ratios and equal tokens, as rows of one table."""

from collections.abc import Sequence
from statistics import median

from benchmarks.peers.served import Turn
from benchmarks.peers.servers import Contender

HEADER = """\
| concurrency | server | tokens/s | diffray / it | diffray with dual cache / it | equal tokens \
| equal answers |
|---|---|---|---|---|---|---|"""


def ratios(ours: Sequence[float], theirs: Sequence[float]) -> str:
    """Return the median over turns of one turn's two rates, with its range."""
    found = sorted(mine / other for mine, other in zip(ours, theirs, strict=True))
    return f"{median(found):.2f} ({found[0]:.2f} to {found[-1]:.2f})"


def equal_tokens(mine: Sequence[Sequence[object]], others: Sequence[Sequence[object]]) -> int:
    """Return at how many places two systems' answers have the same token."""
    rows = zip(mine, others, strict=True)
    return sum(a == b for row, other in rows for a, b in zip(row, other, strict=False))


def served_rows(
    concurrency: int, found: list[Contender], results: dict[str, list[Turn]]
) -> list[str]:
    """Return a row for each contender; the first two are what the others are compared with."""
    rates = {name: [turn.rate for turn in turns] for name, turns in results.items()}
    same, cached = found[0].name, found[1].name
    rows = []
    for contender in found:
        name = contender.name
        cells = [str(concurrency), name, f"{median(rates[name]):.1f}"]
        for base in (same, cached):
            cells.append("1" if base == name else ratios(rates[base], rates[name]))
        cells += equalities(results[same][-1].answers, results[name][-1].answers, contender)
        rows.append(f"| {' | '.join(cells)} |")
    return rows


def equalities(
    mine: list[list[str]], others: list[list[str]], contender: Contender
) -> tuple[str, str]:
    if not contender.same:
        return "another algorithm", "another algorithm"
    total = sum(map(len, mine))
    whole = sum(a == b for a, b in zip(mine, others, strict=True))
    return f"{equal_tokens(mine, others)}/{total}", f"{whole}/{len(mine)}"
