"""`diffray chat` and `diffray batch`: the commands for a running server."""

from pathlib import Path
from typing import Annotated

import typer

from diffray.cluster.cli import flags
from diffray.cluster.cli.commands import refuse
from diffray.cluster.serve.address import API_KEY
from diffray.components.config import counted


def chat(
    context: typer.Context,
    *,
    base_url: Annotated[
        str, typer.Option(metavar="URL", help="The server's URL, with or without /v1.")
    ] = "http://127.0.0.1:8000",
    model: Annotated[
        str | None,
        typer.Option("--model", "-m", help="The model's name on the server; default: the first."),
    ] = None,
    api_key: Annotated[str | None, typer.Option(help=flags.API_KEY_HELP, envvar=API_KEY)] = None,
    watch: Annotated[
        bool, typer.Option(help="Show how masks turn into text, step by step.")
    ] = True,
    pace: flags.Pace = flags.PACE,
    system: Annotated[
        str | None, typer.Option(help="The system message.", rich_help_panel="Request")
    ] = None,
    answer: flags.Answer,
    diffusion: flags.Diffusion,
    settings: flags.Settings = None,
) -> None:
    """Chat with a server, in the terminal or line by line from stdin.

    On a terminal every step of an answer is shown; /help lists commands, such as /policy. From
    stdin, the exit status is 1 if a line had no answer.
    """
    if not watch:
        refuse(context, "with --no-watch", ("pace",))
    from diffray.cluster.cli.chat import chat as converse
    from diffray.cluster.cli.endpoint import Endpoint

    options = flags.request_options(answer | diffusion, settings)
    endpoint = Endpoint.at(base_url, api_key)
    succeeded = converse(
        endpoint, model=model, options=options, system=system, watch=watch, pace=pace
    )
    if not succeeded:
        raise typer.Exit(1)


def batch(
    context: typer.Context,
    source: Annotated[
        Path, typer.Argument(help="Requests, in OpenAI's batch format (JSON lines).")
    ],
    target: Annotated[
        Path, typer.Argument(help="Answers; requests that already have one here are skipped.")
    ],
    *,
    base_url: Annotated[
        str | None, typer.Option(metavar="URL", help="The server's URL, with or without /v1.")
    ] = None,
    api_key: Annotated[str | None, typer.Option(help=flags.API_KEY_HELP, envvar=API_KEY)] = None,
    model: Annotated[
        str | None,
        typer.Option(
            "--model",
            "-m",
            help="The model's name on the server; without --base-url a checkpoint to load here.",
        ),
    ] = None,
    concurrency: Annotated[int, typer.Option(help="Requests in flight at once.")] = 64,
    timeout: Annotated[float, typer.Option(help="Seconds to wait for a server's answer.")] = 600.0,
    engine: flags.BatchEngine,
) -> None:
    """Answer a file of requests, with a server or a model loaded here.

    The exit status is 1 if a request failed; its line in the answers says why.
    """
    from diffray.cluster.cli.batch_backends import endpoint_answers, engine_answers
    from diffray.cluster.cli.batch_run import run_batch
    from diffray.cluster.cli.endpoint import Endpoint
    from diffray.cluster.control.engine_config import EngineConfig

    if base_url is not None:
        refuse(context, "with --base-url", engine)
        if not timeout > 0:
            raise ValueError(f"--timeout must be above 0 (given: {timeout:g})")
        endpoint = Endpoint.at(base_url, api_key)
        answers = endpoint_answers(endpoint, model=model, timeout=timeout)
    elif model is not None:
        refuse(context, "without --base-url", ("api_key", "timeout"))
        answers = engine_answers(model, EngineConfig(**engine))
    else:
        raise ValueError("give --base-url URL of a server, or --model to load a model here")
    summary = run_batch(source, target, answers, concurrency=concurrency)
    typer.echo(str(summary), err=True)
    if summary.interrupted:
        raise typer.Exit(130)
    if failed := summary.failed + summary.failed_before:
        raise ValueError(
            f"{failed} of {counted(summary.requests, 'request')} failed; {target} says why; to "
            "retry a request, delete its line there and run again"
        )
