"""The table of served peers: rates, paired ratios and equal tokens."""

from benchmarks import paired
from benchmarks.peers.servers import Contender

HEAD = paired.head(
    *("concurrency", "server", "tokens/s", "diffray / it", "diffray with dual cache / it"),
    *("equal tokens", "equal answers"),
)


def served_rows(
    concurrency: int, found: list[Contender], results: dict[str, list[paired.Turn]]
) -> list[str]:
    """Return a row for each contender; the first two are what the others are compared with."""
    first, cached = (results[contender.name] for contender in found[:2])
    rows = []
    for contender in found:
        turns = results[contender.name]
        cells = [
            "1" if base is turns else paired.ratio(paired.rates(base), paired.rates(turns))
            for base in (first, cached)
        ]
        equal = ["another algorithm"] * 2
        if contender.same:
            pair = first[-1], turns[-1]
            equal = [paired.equal_tokens(*pair), paired.equal_answers(*pair)]
        rows.append(paired.row(concurrency, contender.name, paired.rate(turns), *cells, *equal))
    return rows
