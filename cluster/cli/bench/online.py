"""`diffray bench serve`: guidellm puts the load on a server; /metrics tell of the diffusion."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from itertools import product
from math import inf
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any

import httpx2
import typer

from diffray.cluster.cli import flags
from diffray.cluster.cli.bench import flags as own
from diffray.cluster.cli.bench.counters import between, scrape
from diffray.cluster.cli.bench.datasets import RANDOM, read_sets
from diffray.cluster.cli.bench.guidellm import profile, run_guidellm, summary, write_data
from diffray.cluster.cli.bench.results import interruptible, publish, table, when_and_where
from diffray.cluster.cli.endpoint import Endpoint
from diffray.cluster.cli.failures import one_sentence
from diffray.cluster.cli.flag_records import spread
from diffray.cluster.cli.help import Command
from diffray.cluster.cli.request_options import request_options

OBJECTIVES = ("ttft", "tpot", "e2el")
# Columns: a number's name in the JSON, and its digits.
_CLIENT = {
    "req/s": ("request_throughput", 2),
    "good req/s": ("request_goodput", 2),
    "tokens/s": ("output_throughput", 1),
    "TTFT ms": ("median_ttft_ms", 1),
    "TPOT ms": ("median_tpot_ms", 2),
    "E2EL ms": ("median_e2el_ms", 1),
    "P99 E2EL ms": ("p99_e2el_ms", 1),
}
_SERVERS = {
    "tokens per forward": ("diffusion_committed_per_step", 2),
    "steps per block": ("diffusion_steps_per_canvas", 1),
    "steps": ("diffusion_denoising_steps", 0),
    "tokens": ("diffusion_committed_tokens", 0),
    "rounds": ("rounds", 0),
    "preempted": ("preemptions", 0),
    "cached prompt tokens": ("cached_prompt_tokens", 0),
    "rank 0 works s": ("rank_work_seconds", 2),
    "rank 0 waits s": ("rank_wait_seconds", 2),
}
_SERVER, _TRAFFIC, _RESULT = "Server", "Traffic", "Result"


class ManyValues(Command):
    """Takes several values after one --goodput: --goodput ttft:9 e2el:99."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        words: list[str] = []
        inside = False
        for word in args:
            if inside and not word.startswith("-") and words[-1] != "--goodput":
                words.append("--goodput")
            inside = word == "--goodput" if word.startswith("-") else inside
            words.append(word)
        return super().parse_args(ctx, words)


@dataclass(frozen=True, slots=True)
class Server:
    """Which server is asked."""

    base_url: Annotated[
        str,
        typer.Option(
            metavar="URL",
            help="The server's address, with or without /v1.",
            rich_help_panel=_SERVER,
        ),
    ] = "http://127.0.0.1:8000"
    model: Annotated[
        str | None,
        typer.Option(
            "--model",
            "-m",
            help="The model's name on the server; default: the first.",
            rich_help_panel=_SERVER,
        ),
    ] = None
    tokenizer: Annotated[
        str | None,
        typer.Option(
            metavar="MODEL",
            help="The checkpoint whose tokenizer makes random prompts; default: the model.",
            rich_help_panel=_SERVER,
        ),
    ] = None
    api_key: Annotated[
        str | None,
        typer.Option(
            help="The server's API key, if it wants one.",
            envvar=["DIFFRAY_API_KEY", "OPENAI_API_KEY"],
            rich_help_panel=_SERVER,
        ),
    ] = None


@dataclass(frozen=True, slots=True)
class Traffic:
    """When requests are sent, and which of them were fast enough."""

    request_rate: Annotated[
        str,
        typer.Option(
            metavar="RPS[,RPS...]",
            help="Requests per second, as a Poisson process; inf: all at once; several make a "
            "sweep.",
            rich_help_panel=_TRAFFIC,
        ),
    ] = "inf"
    max_concurrency: Annotated[
        str | None,
        typer.Option(
            metavar="N[,N...]",
            help="The most requests in flight; several make a sweep.",
            rich_help_panel=_TRAFFIC,
        ),
    ] = None
    goodput: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME:MS",
            help="Count requests within these limits (ttft, tpot, e2el, in ms) as good.",
            rich_help_panel=_TRAFFIC,
        ),
    ] = None

    def objectives(self) -> dict[str, float] | None:
        """Return guidellm's names of the limits, in milliseconds."""
        found = {}
        for pair in [pair for typed in self.goodput or [] for pair in typed.split()]:
            name, _, limit = pair.partition(":")
            try:
                found[f"{name}_ms"] = float(limit)
            except ValueError:
                found[f"{name}_ms"] = 0.0
            if name not in OBJECTIVES or not found[f"{name}_ms"] > 0:
                raise ValueError(
                    f"--goodput {pair!r} is not NAME:MILLISECONDS with a name of "
                    f"{', '.join(OBJECTIVES)}"
                )
        return found or None


def sweep_tables(runs: Sequence[dict[str, Any]]) -> list[Any]:
    """Return what the client saw of each run, and what the server says it did."""

    def cell(run: dict[str, Any], name: str, digits: int) -> str:
        value = run.get(name)
        return "-" if value is None or not run["completed"] else f"{value:.{digits}f}"

    who = [
        [
            run["dataset_name"],
            str(run["max_concurrency"] or "-"),
            "all at once" if run["request_rate"] == "inf" else f"{run['request_rate']:g}",
        ]
        for run in runs
    ]

    def made(columns: dict[str, tuple[str, int]], first: str = "") -> Any:
        rows = [
            [
                *whose,
                *([f"{run['completed']} of {run['completed'] + run['failed']}"] if first else []),
                *(cell(run, name, digits) for name, digits in columns.values()),
            ]
            for whose, run in zip(who, runs, strict=True)
        ]
        return table(("data", "concurrency", "RPS", *filter(None, [first]), *columns), rows)

    return [made(_CLIENT, "answered"), made(_SERVERS)]


def scenario_of(
    server: Server, model: str, url: str, name: str, data: own.Data, body: dict[str, Any]
) -> dict[str, Any]:
    """Return what guidellm asks of the server for one data set, whatever the load."""
    is_random = name == RANDOM
    ends = {"ignore_eos": data.ignore_eos or is_random}
    return {
        "backend": {
            "kind": "openai_http",
            "target": url,
            "model": model,
            "request_format": "/v1/completions" if is_random else "/v1/chat/completions",
            "api_key": server.api_key,
            "verify": True,
            "extras": {"body": ends | body},
        },
        "constraints": [{"kind": "max_requests", "count": data.num_prompts}],
    }


def tokenizer_of(server: Server, model: str) -> str:
    from diffray.components.checkpoints.checkpoint import resolve

    return str(resolve(server.tokenizer or model))


@spread
def serve(
    *,
    server: Server,
    data: own.Data,
    seed: own.Seed = 0,
    traffic: Traffic,
    sampling: flags.Sampling,
    diffusion: flags.Diffusion,
    result: own.Result,
    guidellm_dir: Annotated[
        Path | None,
        typer.Option(
            metavar="FOLDER",
            help="Keep guidellm's own reports, with every request, in this folder.",
            rich_help_panel=_RESULT,
        ),
    ] = None,
) -> None:
    """Measure a server under load from guidellm, and what its /metrics say of the decoding."""
    with one_sentence():
        facts = when_and_where()
        result.check()
        if find_spec("guidellm") is None:
            raise ValueError("bench serve needs guidellm; pip install 'diffray[bench]'")
        endpoint = Endpoint.at(server.base_url, server.api_key)
        rates = own.numbers(traffic.request_rate, "--request-rate", low=1e-6)
        limits = traffic.max_concurrency
        at_once = [*own.counts(limits, "--max-concurrency")] if limits else [None]
        body = request_options(flags.typed_request(sampling, diffusion), diffusion.settings or ())
        for name, flag in (("max_tokens", "--output-len"), ("model", "--model")):
            if name in body:
                raise ValueError(f"--set {name}: give {flag} instead")
        objectives, sets = traffic.objectives(), read_sets(data)
        if guidellm_dir is not None:
            guidellm_dir.mkdir(parents=True, exist_ok=True)
        found: list[dict[str, Any]] = []
        runs = [*product(sets, rates, at_once)]
        with (
            httpx2.Client(**endpoint.options(timeout=60)) as client,
            TemporaryDirectory() as made,
            interruptible(len(runs)) as progress,
        ):
            model = server.model or endpoint.first_model(client)
            facts |= {"server": endpoint.url, "model": model, "asked": json.dumps(body)}
            for number, ((name, asks), rate, limit) in enumerate(runs):
                scenario = scenario_of(server, model, endpoint.url, name, data, body) | {
                    "profile": profile(rate, limit),
                    "seed": {"kind": "static", "value": seed + number},
                    "metrics": {"kind": "generative", "slo": objectives},
                }
                tokenizer = tokenizer_of(server, model) if name == RANDOM else None
                scenario |= write_data(Path(made), name, asks, data, tokenizer)
                typer.echo(
                    f"run {number + 1} of {len(runs)}: {name}, {json.dumps(profile(rate, limit))}"
                )
                kept = guidellm_dir / f"run-{number + 1}" if guidellm_dir else None
                before = scrape(client)
                benchmark = run_guidellm(scenario, Path(made), kept)
                run: dict[str, Any] = {"model_id": model, "dataset_name": name}
                run |= {"request_rate": "inf" if rate == inf else rate, "max_concurrency": limit}
                run |= summary(benchmark)
                run |= between(before, scrape(client), run["duration"])
                reasons = [one["info"]["error"] for one in benchmark["requests"]["errored"]]
                for reason in dict.fromkeys(reasons):
                    typer.echo(f"failed: {reasons.count(reason)} x {reason}")
                found.append(run)
                progress.done += 1
        if found and "diffusion_committed_tokens" not in found[-1]:
            typer.echo("The server's /metrics do not tell of diffusion.")
        publish(progress, "serving", facts, found, sweep_tables(found), result)
        if found and not any(run["completed"] for run in found):
            raise ValueError("no request succeeded")
