"""`diffray bench serve`: guidellm loads a server, whose /metrics count the denoising."""

import json
from collections.abc import Sequence
from importlib.util import find_spec
from itertools import product
from math import inf
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import typer

from diffray.cluster.cli import flags
from diffray.cluster.cli.bench.datasets import Data, read_sets
from diffray.cluster.cli.bench.guidellm import (
    LATENCIES,
    backend,
    longest_request,
    profile,
    run_guidellm,
    summary,
    write_data,
)
from diffray.cluster.cli.bench.results import Result, Run, published, table
from diffray.cluster.cli.bench.sweep import counts, numbers
from diffray.cluster.cli.flag_records import flag, record, spread
from diffray.cluster.cli.request_options import request_options
from diffray.cluster.serve.environment import API_KEY

if TYPE_CHECKING:
    import httpx2
    from rich.table import Table

    from diffray.cluster.cli.endpoint import Endpoint

_WHO = {"data": "{dataset_name}", "concurrency": "{concurrency}", "RPS": "{rps}"}
_CLIENT = {
    "answered": "{answered}",
    "req/s": "{request_throughput:.2f}",
    "good req/s": "{request_goodput:.2f}",
    "tokens/s": "{output_throughput:.1f}",
    "TTFT ms": "{median_ttft_ms:.1f}",
    "TPOT ms": "{median_tpot_ms:.2f}",
    "E2EL ms": "{median_e2el_ms:.1f}",
    "P99 E2EL ms": "{p99_e2el_ms:.1f}",
}
_SERVERS = {
    "tokens per forward": "{diffusion_committed_per_step:.2f}",
    "steps per block": "{diffusion_steps_per_canvas:.1f}",
    "steps": "{diffusion_denoising_steps:.0f}",
    "tokens": "{diffusion_committed_tokens:.0f}",
    "rounds": "{rounds:.0f}",
    "preempted": "{preemptions:.0f}",
    "cached prompt tokens": "{cached_prompt_tokens:.0f}",
    "rank 0 works s": "{rank_work_seconds:.2f}",
    "rank 0 waits s": "{rank_wait_seconds:.2f}",
}


@record("Server")
class Server(flags.Server):
    tokenizer: str | None = flag(
        metavar="MODEL",
        help="The checkpoint whose tokenizer makes random prompts; default: the model.",
    )
    api_key: str | None = flag(help=flags.API_KEY_HELP, envvar=[API_KEY, "OPENAI_API_KEY"])


@record("Traffic")
class Traffic:
    request_rate: str = flag(
        "inf",
        metavar="RPS[,RPS...]",
        help="Requests per second, as a Poisson process; inf: all at once; several make a sweep.",
    )
    max_concurrency: str | None = flag(
        metavar="N[,N...]", help="The most requests in flight; several make a sweep."
    )
    goodput: list[str] | None = flag(
        metavar="NAME:MS",
        help="Count requests within these limits (ttft, tpot, e2el, in ms) as good.",
    )

    def rates(self) -> list[float]:
        return numbers(self.request_rate, "--request-rate", low=1e-6)

    def limits(self) -> list[int] | list[None]:
        most = self.max_concurrency
        return counts(most, "--max-concurrency") if most else [None]

    def objectives(self) -> dict[str, float] | None:
        """Return the limits of --goodput under guidellm's names, in milliseconds."""
        found = {}
        for pair in " ".join(self.goodput or []).split():
            name, _, text = pair.partition(":")
            try:
                limit = float(text)
            except ValueError:
                limit = 0.0
            if name not in LATENCIES or not limit > 0:
                raise ValueError(
                    f"--goodput {pair!r} is not NAME:MILLISECONDS with a name of "
                    f"{', '.join(LATENCIES)}"
                )
            found[f"{name}_ms"] = limit
        return found or None


@record("Result")
class Reports(Result):
    guidellm_dir: Path | None = flag(
        metavar="FOLDER", help="Keep guidellm's own reports, with every request, in this folder."
    )


def tables(runs: Sequence[Run]) -> "list[Table]":
    """Return tables of what the client measured in each run, and what the server counted."""
    shown = []
    for run in runs:
        rate, done = run["request_rate"], run["completed"]
        who = {
            "dataset_name": run["dataset_name"],
            "concurrency": run["max_concurrency"] or "-",
            "rps": "all at once" if rate == "inf" else f"{rate:g}",
            "answered": f"{done} of {done + run['failed']}",
        }
        shown.append((run if done else {}) | who)
    return [table(_WHO | _CLIENT, shown), table(_WHO | _SERVERS, shown)]


def measure(
    client: "httpx2.Client", scenario: dict[str, Any], folder: Path, kept: Path | None
) -> Run:
    """Run guidellm once; return what it measured, and what the server counted meanwhile."""
    from diffray.cluster.cli.bench.counters import between, scrape

    before = scrape(client)
    benchmark = run_guidellm(scenario, folder, kept)
    found = summary(benchmark)
    reasons = [one["info"]["error"] for one in benchmark["requests"]["errored"]]
    found |= between(before, scrape(client), found["duration"])
    for reason in dict.fromkeys(reasons):
        first, _, _ = reason.partition(r"\n")  # the rest is a link to a list of statuses
        typer.echo(f"failed: {reasons.count(reason)} x {first}")
    if reasons and (said := refusal(client, scenario)):
        typer.echo(f"asked once more, {said}")
    return found


def refusal(client: "httpx2.Client", scenario: dict[str, Any]) -> str:
    """Return why the server refuses a run's longest request, which guidellm does not tell."""
    import httpx2

    from diffray.cluster.cli.endpoint import complaint, json_of

    path, body = longest_request(scenario)
    try:
        response = client.post(path, json=body)
    except httpx2.TransportError:
        return ""
    ok = response.status_code == 200
    return "" if ok else complaint(json_of(response), response.status_code)


def named(
    endpoint: "Endpoint", client: "httpx2.Client", model: str | None
) -> tuple[str, int | None]:
    """Return the model to ask, by default the first, and its context where the server tells it."""
    from diffray.cluster.cli.endpoint import Refused

    try:
        contexts = {str(m["id"]): m.get("max_model_len") for m in endpoint.models(client)}
    except Refused:
        if model is None:
            raise
        return model, None
    name = model or next(iter(contexts))
    return name, contexts.get(name)


@spread
def serve(
    *,
    server: Server,
    data: Data,
    traffic: Traffic,
    sampling: flags.Sampling,
    diffusion: flags.Diffusion,
    result: Reports,
) -> None:
    """Measure a server under load, and read its /metrics."""
    import httpx2

    from diffray.cluster.cli.endpoint import Endpoint

    if find_spec("guidellm") is None:
        raise ValueError("bench serve needs guidellm; pip install 'diffray[bench]'")
    endpoint = Endpoint.at(server.base_url, server.api_key)
    objectives, body = traffic.objectives(), request_options(sampling, diffusion)
    for name, instead in (("max_tokens", "--output-len"), ("model", "--model")):
        if name in body:
            raise ValueError(f"--set {name}: give {instead} instead")
    runs = [*product(read_sets(data), traffic.rates(), traffic.limits())]
    with (
        published("serving", result, tables) as report,
        httpx2.Client(**endpoint.options(timeout=60)) as client,
        TemporaryDirectory() as made,
    ):
        model, context = named(endpoint, client, server.model)
        folder = Path(made)
        report.planned = len(runs)
        report.facts |= {"server": endpoint.url, "model": model, "options": json.dumps(body)}
        if result.guidellm_dir is not None:
            result.guidellm_dir.mkdir(parents=True, exist_ok=True)
        for number, ((name, rows), rate, limit) in enumerate(runs):
            tokenizer = server.tokenizer or model
            scenario = write_data(folder, name, rows, data, tokenizer, context) | {
                "backend": backend(
                    name, data, body, target=endpoint.url, model=model, api_key=server.api_key
                ),
                "constraints": [{"kind": "max_requests", "count": len(rows) or data.num_random}],
                "profile": profile(rate, limit),
                "seed": {"kind": "static", "value": data.seed + number},
                "metrics": {"kind": "generative", "slo": objectives},
            }
            typer.echo(
                f"run {number + 1} of {len(runs)}: {name}, {json.dumps(scenario['profile'])}"
            )
            run: Run = {"model_id": model, "dataset_name": name}
            run |= {"request_rate": "inf" if rate == inf else rate, "max_concurrency": limit}
            kept = result.guidellm_dir and result.guidellm_dir / f"run-{number + 1}"
            report.runs.append(run | measure(client, scenario, folder, kept))
        if report.runs[-1]["completed"] and "diffusion_committed_tokens" not in report.runs[-1]:
            typer.echo("The server's /metrics have no counters of diffusion.")
    if not any(run["completed"] for run in report.runs):
        raise ValueError("no request succeeded")
