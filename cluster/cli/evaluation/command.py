"""`diffray eval`."""

from contextlib import AbstractAsyncContextManager
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

import typer
from typer import Option

import diffray
from diffray.cluster.cli import flags
from diffray.cluster.cli.batch import endpoint_answers, engine_answers
from diffray.cluster.cli.batch_run import Answer
from diffray.cluster.cli.commands import refuse
from diffray.cluster.cli.endpoint import Endpoint
from diffray.cluster.cli.evaluation.policies import DEFAULT, NamedPolicy, read_policies
from diffray.cluster.cli.evaluation.report import markdown, report, write_report
from diffray.cluster.cli.evaluation.run import Asked, Backend, run
from diffray.cluster.cli.evaluation.tasks import read_items
from diffray.cluster.control.engine_config import EngineConfig
from diffray.cluster.serve.address import API_KEY
from diffray.components.checkpoints.demos import NAMES
from diffray.components.config import counted

_SHOWN = 3  # reasons why requests failed


def evaluate(
    context: typer.Context,
    model: Annotated[
        str, typer.Argument(help=flags.CHECKPOINT, metavar="MODEL", autocompletion=lambda: [*NAMES])
    ],
    *,
    tasks: Annotated[
        str,
        Option(
            metavar="TASK[,TASK...]",
            help="gsm8k, gsm8k-few-shot, humaneval, humaneval-completion, demo, demo-harder, "
            "demo-json, demo-schema, or files: rows (.jsonl), tasks (.yaml).",
        ),
    ],
    policies: Annotated[
        Path | None,
        Option(metavar="FILE.yaml", help="The policies to compare; default: the model's own."),
    ] = None,
    out: Annotated[Path, Option(metavar="DIR", help="The folder of answers and report.")],
    limit: Annotated[int | None, Option(min=1, help="The most questions of a task.")] = None,
    samples: Annotated[int, Option(min=1, help="Answers to each question.")] = 1,
    seed: Annotated[int, Option(help="The seed of sampling.")] = 0,
    concurrency: Annotated[int, Option(min=1, help="Requests in flight at once.")] = 8,
    base_url: Annotated[
        str | None, Option(metavar="URL", help="The URL of a server that serves MODEL.")
    ] = None,
    api_key: Annotated[str | None, Option(help=flags.API_KEY_HELP, envvar=API_KEY)] = None,
    timeout: Annotated[float, Option(help="Seconds to wait for a server's answer.")] = 600.0,
    engine: flags.BatchEngine,
) -> None:
    """Measure the accuracy and speed of policies over tasks.

    The report is in DIR: summary.md, summary.json, report.html. Run again to continue.
    """
    compared = read_policies(policies) if policies else [DEFAULT]
    asked = Asked(model, read_items(tasks, limit), samples, seed)
    if base_url is not None:
        refuse(context, "with --base-url", engine)
        backend = _server(compared, Endpoint.at(base_url, api_key), timeout)
    else:
        refuse(context, "without --base-url", ("api_key", "timeout"))
        backend = _local(model, engine)
    summary, rows, failures = run(out, asked, compared, backend, concurrency)
    if rows:
        facts = {"model": model, "diffray": diffray.__version__, "samples": samples, "seed": seed}
        facts |= {"concurrency": concurrency} | {k: v for k, v in engine.items() if v is not None}
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


def _local(model: str, engine: dict[str, Any]) -> Backend:
    def load(options: dict[str, Any]) -> AbstractAsyncContextManager[Answer]:
        return engine_answers(model, EngineConfig(**engine | options))

    return load


def _server(compared: list[NamedPolicy], endpoint: Endpoint, timeout: float) -> Backend:
    for each in compared:
        if each.engine:
            raise ValueError(
                f"policy {each.name!r} has options of an engine, which a running server cannot "
                "change; leave out engine, or --base-url"
            )

    def connect(_: dict[str, Any]) -> AbstractAsyncContextManager[Answer]:
        return endpoint_answers(endpoint, timeout=timeout)

    return connect
