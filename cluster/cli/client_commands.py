"""`diffray chat` and `diffray batch`: the commands for a running server."""

from pathlib import Path
from typing import Annotated

import typer

from diffray.cluster.cli import flags
from diffray.cluster.cli.flag_records import flag, names_of, record, refuse_flags, spread, typed
from diffray.cluster.serve.environment import API_KEY
from diffray.components.config import counted


@spread
def chat(
    context: typer.Context,
    *,
    server: flags.Server,
    watching: flags.Watching,
    system: flags.System = None,
    answer: flags.Answer,
    diffusion: flags.Diffusion,
) -> None:
    """Chat with a server, in the terminal or line by line from stdin.

    On a terminal every step of an answer is shown; /help lists commands, such as /policy. From
    stdin, the exit status is 1 if a line had no answer.
    """
    if not watching.watch:
        refuse_flags(context, "with --no-watch", ("pace",))
    from diffray.cluster.cli.chat import chat as converse
    from diffray.cluster.cli.endpoint import Endpoint
    from diffray.cluster.cli.request_options import request_options

    options = request_options(answer, diffusion)
    endpoint = Endpoint.at(server.base_url, server.api_key)
    succeeded = converse(
        endpoint,
        model=server.model,
        options=options,
        system=system,
        watch=watching.watch,
        pace=watching.pace,
    )
    if not succeeded:
        raise typer.Exit(1)


@record("Batch")
class Backend:
    base_url: str | None = flag(metavar="URL", help="The server's URL, with or without /v1.")
    api_key: str | None = flag(help=flags.API_KEY_HELP, envvar=API_KEY)
    model: str | None = flag(
        None,
        "--model",
        "-m",
        help="The model's name on the server; without --base-url a checkpoint to load here.",
    )
    concurrency: int = flag(64, help="Requests in flight at once.")
    timeout: float = flag(600.0, help="Seconds to wait for a server's answer.")


@spread
def batch(
    context: typer.Context,
    source: Annotated[
        Path, typer.Argument(help="Requests, in OpenAI's batch format (JSON lines).")
    ],
    target: Annotated[
        Path, typer.Argument(help="Answers; requests that already have one here are skipped.")
    ],
    *,
    backend: Backend,
    engine: flags.BatchEngine,
) -> None:
    """Answer a file of requests, with a server or a model loaded here.

    The exit status is 1 if a request failed; its line in the answers says why.
    """
    from diffray.cluster.cli.batch_backends import endpoint_answers, engine_answers
    from diffray.cluster.cli.batch_run import run_batch
    from diffray.cluster.cli.endpoint import Endpoint
    from diffray.cluster.control.engine_config import EngineConfig

    model, timeout = backend.model, backend.timeout
    if backend.base_url is not None:
        refuse_flags(context, "with --base-url", names_of(flags.BatchEngine))
        if not timeout > 0:
            raise ValueError(f"--timeout must be above 0 (given: {timeout:g})")
        endpoint = Endpoint.at(backend.base_url, backend.api_key)
        answers = endpoint_answers(endpoint, model=model, timeout=timeout)
    elif model is not None:
        refuse_flags(context, "without --base-url", ("api_key", "timeout"))
        answers = engine_answers(model, EngineConfig(**typed(engine)))
    else:
        raise ValueError("give --base-url URL of a server, or --model to load a model here")
    summary = run_batch(source, target, answers, concurrency=backend.concurrency)
    typer.echo(str(summary), err=True)
    if summary.interrupted:
        raise typer.Exit(130)
    if failed := summary.failed + summary.failed_before:
        raise ValueError(
            f"{failed} of {counted(summary.requests, 'request')} failed; {target} says why; to "
            "retry a request, delete its line there and run again"
        )
