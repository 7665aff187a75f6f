"""`diffray eval` and `diffray tune`."""

import asyncio
import time
from contextlib import AbstractAsyncContextManager
from importlib.util import find_spec
from pathlib import Path
from random import Random
from typing import Annotated, Any

import httpx2
import typer
from typer import Option

import diffray
from diffray.cluster.api.batch_lines import Answer
from diffray.cluster.cli import flags
from diffray.cluster.cli.batch import endpoint_answers, engine_answers
from diffray.cluster.cli.commands import refuse
from diffray.cluster.cli.endpoint import Endpoint
from diffray.cluster.cli.evaluation.policies import DEFAULT, NamedPolicy, read_policies
from diffray.cluster.cli.evaluation.report import markdown, report, write_report
from diffray.cluster.cli.evaluation.run import Asked, Backend, locked, run
from diffray.cluster.cli.evaluation.tasks import read_items
from diffray.cluster.control.engine_config import EngineConfig
from diffray.cluster.serve.address import API_KEY
from diffray.components.checkpoints.demos import NAMES
from diffray.components.config import counted

_SHOWN = 3  # reasons why requests failed

Model = Annotated[
    str, typer.Argument(help=flags.CHECKPOINT, metavar="MODEL", autocompletion=lambda: [*NAMES])
]
Tasks = Annotated[
    str,
    Option(
        "--tasks",
        "--task",
        metavar="TASK[,TASK...]",
        help="gsm8k, gsm8k-few-shot, humaneval, humaneval-completion, demo, demo-harder, "
        "demo-json, demo-schema, or files: rows (.jsonl), tasks (.yaml).",
    ),
]
Out = Annotated[Path, Option(metavar="DIR", help="The folder of answers and report.")]
Limit = Annotated[int | None, Option(min=1, help="The most questions of a task.")]
MaxTokens = Annotated[
    int | None, Option(min=1, help="The most tokens of an answer; default: the task's.")
]
Tried = Annotated[
    Path | None,
    Option(
        metavar="FILE.yaml",
        help="The policies to try, the reference first; default: one token a step as the "
        "reference, and decoders and caches that fit the model.",
    ),
]
Seed = Annotated[int, Option(help="The seed of sampling.")]
Concurrency = Annotated[int, Option(min=1, help="Requests in flight at once.")]
BaseUrl = Annotated[
    str | None, Option(metavar="URL", help="The URL of a server that serves MODEL.")
]
ApiKey = Annotated[str | None, Option(help=flags.API_KEY_HELP, envvar=API_KEY)]
Timeout = Annotated[float, Option(min=0.001, help="Seconds to wait for a server's answer.")]


def evaluate(
    context: typer.Context,
    model: Model,
    *,
    tasks: Tasks,
    policies: Annotated[
        Path | None,
        Option(metavar="FILE.yaml", help="The policies to compare; default: the model's own."),
    ] = None,
    out: Out,
    limit: Limit = None,
    max_tokens: MaxTokens = None,
    samples: Annotated[int, Option(min=1, help="Answers to each question.")] = 1,
    seed: Seed = 0,
    concurrency: Concurrency = 8,
    base_url: BaseUrl = None,
    api_key: ApiKey = None,
    timeout: Timeout = 600.0,
    engine: flags.BatchEngine,
) -> None:
    """Measure the accuracy and speed of policies over tasks.

    The report is in DIR: summary.md, summary.json, report.html. Run again to continue.
    """
    compared = read_policies(policies) if policies else [DEFAULT]
    endpoint = _endpoint(context, base_url, api_key, engine)
    where = engine | _served(endpoint)
    asked = Asked(model, read_items(tasks, limit, max_tokens), samples, seed, concurrency, where)
    backend = _backend(model, engine, endpoint, timeout, compared)
    summary, rows, failures = run(out, asked, compared, backend)
    if rows:
        facts = {"model": model, "diffray": diffray.__version__, "samples": samples, "seed": seed}
        facts |= {"concurrency": concurrency} | where
        _report(out, report(compared, rows, facts), rows)
    if summary.interrupted:
        typer.echo("diffray: interrupted; run again to continue", err=True)
        raise typer.Exit(130)
    if failures:
        reasons = "; ".join(list(dict.fromkeys(failures))[:_SHOWN])
        raise ValueError(f"{counted(len(failures), 'request')} failed: {reasons}")


def _report(out: Path, found: dict[str, Any], rows: list[dict[str, Any]]) -> None:
    write_report(out, found)
    typer.echo(markdown(found))
    if find_spec("plotly") is None:
        typer.echo("no report.html: it needs plotly (pip install 'diffray[eval]')", err=True)
        return
    from diffray.cluster.cli.evaluation.page import page

    (out / "report.html").write_text(page(found, rows), encoding="utf-8")
    typer.echo(out / "report.html")


def tune(
    context: typer.Context,
    model: Model,
    *,
    tasks: Tasks,
    max_loss: Annotated[
        str, Option(metavar="POINTS", help="The most accuracy to lose, in points, such as 0.5pp.")
    ] = "1pp",
    minutes: Annotated[float, Option(min=0, help="No measurement begins after so many.")] = 30.0,
    policies: Tried = None,
    out: Out,
    limit: Limit = None,
    max_tokens: MaxTokens = None,
    seed: Seed = 0,
    concurrency: Concurrency = 8,
    base_url: BaseUrl = None,
    api_key: ApiKey = None,
    timeout: Timeout = 600.0,
    engine: flags.BatchEngine,
) -> None:
    """Find the fastest policy that is as accurate as a reference.

    DIR/policy.yaml is for `diffray serve --diffusion`. Run again to continue.
    """
    from diffray.cluster.cli.evaluation import tuning

    allowed = _points(max_loss)
    endpoint = _endpoint(context, base_url, api_key, engine)
    tried = read_policies(policies) if policies else tuning.space(_accepts(model, endpoint))
    for each in tried:
        if each.engine or each.request.keys() - {"diffusion"}:
            raise ValueError(
                f"policy {each.name!r} has more than parts of diffusion, which is all that "
                "policy.yaml holds; leave the rest out"
            )
    items = read_items(tasks, limit, max_tokens)
    Random(seed).shuffle(items)  # each round has questions of all tasks
    asked = Asked(model, items, 1, seed, concurrency, engine | _served(endpoint))
    backend = _backend(model, engine, endpoint, timeout, tried)

    async def found() -> tuning.Outcome:
        async with backend({}) as answer:
            end = time.monotonic() + 60 * minutes
            return await tuning.Tuning(out, asked, answer, allowed, end).best(tried)

    try:
        with locked(out):
            outcome = asyncio.run(found())
    except KeyboardInterrupt:
        typer.echo("diffray: interrupted; run again to continue", err=True)
        raise typer.Exit(130) from None
    text = tuning.as_yaml(outcome, asked, tasks, allowed)
    (out / "policy.yaml").write_text(text)
    (out / "summary.md").write_text(table := tuning.table(outcome, allowed))
    typer.echo(f"{table}\n{out / 'policy.yaml'}:\n{text}", nl=False)


def _points(text: str) -> float:
    """Return a share of accuracy, of points such as 0.5pp."""
    try:
        found = float(text.removesuffix("pp"))
    except ValueError:
        found = -1.0
    if not 0 < found <= 100:
        raise ValueError(f"--max-loss {text!r}: give points of accuracy above 0, such as 0.5pp")
    return found / 100


def _accepts(model: str, endpoint: Endpoint | None) -> dict[str, Any]:
    """Return which parts of a policy fit the model."""
    if endpoint is None:
        from diffray.components.checkpoints.info import describe

        return describe(model).accepts
    with httpx2.Client(**endpoint.options(None)) as client:
        for each in endpoint.models(client):
            if each["id"] == model and "accepts" in each:
                return dict(each["accepts"])
    raise ValueError(f"{endpoint.url} serves no diffusion model {model!r}; give --policies")


def _served(endpoint: Endpoint | None) -> dict[str, Any]:
    return {} if endpoint is None else {"server": True}


def _endpoint(
    context: typer.Context, base_url: str | None, api_key: str | None, engine: dict[str, Any]
) -> Endpoint | None:
    if base_url is None:
        refuse(context, "without --base-url", ("api_key", "timeout"))
        return None
    refuse(context, "with --base-url", engine)
    return Endpoint.at(base_url, api_key)


def _backend(
    model: str,
    engine: dict[str, Any],
    endpoint: Endpoint | None,
    timeout: float,
    policies: list[NamedPolicy],
) -> Backend:
    """Return what answers: a server, or engines in this process."""

    def answers(options: dict[str, Any]) -> AbstractAsyncContextManager[Answer]:
        if endpoint is not None:
            return endpoint_answers(endpoint, timeout=timeout)
        return engine_answers(model, EngineConfig(**engine | options))

    for each in policies:
        if each.engine and endpoint is not None:
            raise ValueError(
                f"policy {each.name!r} has options of an engine, which a running server cannot "
                "change; leave out engine, or --base-url"
            )
    return answers
