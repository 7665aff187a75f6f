"""Tries what a server does with bad input: `python -m tools.fuzz --requests 10000`.

A quarter of the requests is made up by schemathesis from the OpenAPI document, the others by the
cases of this folder. Every answer is judged: no status of 500 or more, refusals in the API's shape
with one sentence, strict JSON, nothing slower than --slowest; afterwards no page is held and the
server is healthy. The run of a seed is always the same; --only repeats one of its cases. --url
tries a server that is running already, as behind Ray Serve, whose proxy refuses in its own words.
"""

import argparse
import sys
from contextlib import nullcontext

from tools.fuzz.cases import case
from tools.fuzz.judge import Findings
from tools.fuzz.run import probe
from tools.fuzz.server import Running, serving


def main() -> int:
    arguments = _arguments()
    url = arguments.url
    with nullcontext(Running(url, 0)) if url else serving(arguments.model) as server:
        before = server.peak_memory() if server.pid else 0
        findings = _run(server.url, arguments)
        grown = server.peak_memory() - before if server.pid else 0
    print(findings.table())
    print(f"\nrequests: {findings.requests}; faults: {len(findings.faults)}; ", end="")
    print(f"slowest: {findings.slowest:.2f} s", end="")
    print(f"; peak memory grew by {grown / 2**20:.0f} MiB" if server.pid else "")
    for fault in findings.faults[:20]:
        print(f"  {fault[:600]}")
    return 1 if findings.faults else 0


def _run(url: str, arguments: argparse.Namespace) -> Findings:
    seed, slowest, proxied = arguments.seed, arguments.slowest, bool(arguments.url)
    if arguments.only is not None:
        made = case(seed, arguments.only)
        print(made.method, made.path, made.headers, made.body[:2000])
        return probe(url, [arguments.only], seed=seed, slowest=slowest, proxied=proxied)
    of_schema = arguments.requests // 4
    findings = probe(
        url,
        range(arguments.requests - of_schema),
        seed=seed,
        slowest=slowest,
        at_once=arguments.at_once,
        proxied=proxied,
        tell=_tell,
    )
    if of_schema:
        from tools.fuzz.from_schema import probe_from_schema

        more = probe_from_schema(
            url, -(-of_schema // 8), seed=seed, slowest=slowest, proxied=proxied
        )
        findings.add(more)
    return findings


def _tell(number: int) -> None:
    if number and number % 500 == 0:
        print(f"{number} ...", file=sys.stderr, flush=True)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tools.fuzz", description=__doc__)
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--at-once", type=int, default=8)
    parser.add_argument("--slowest", type=float, default=5.0, help="seconds of an answer")
    parser.add_argument("--model", default="demo")
    parser.add_argument("--url", help="of a running server")
    parser.add_argument("--only", type=int, help="the case with this number alone")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
