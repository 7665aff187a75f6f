"""`diffray chat`, `diffray batch` and `diffray status`: the commands for a running server."""

from pathlib import Path
from typing import Annotated

import typer

from diffray.cluster.cli import flags
from diffray.cluster.cli.flag_records import flag, names_of, record, refuse_flags, spread, typed
from diffray.cluster.cli.help import panel
from diffray.cluster.serve.environment import API_KEY
from diffray.workers.engine_options import EngineOptions

_server = panel("Server")


@spread
def chat(
    *,
    server: flags.Server,
    system: Annotated[str | None, panel("Request")(help="The system message.")] = None,
    answer: flags.Answer,
    diffusion: flags.Diffusion,
) -> None:
    """Chat with a server, in the terminal or line by line from stdin."""
    from diffray.cluster.cli.chat import chat as converse
    from diffray.cluster.cli.endpoint import Endpoint
    from diffray.cluster.cli.request_options import request_options

    options = request_options(answer, diffusion)
    endpoint = Endpoint.at(server.base_url, server.api_key)
    converse(endpoint, model=server.model, options=options, system=system)


@record("Model", EngineOptions)
class Size:
    """How many requests an engine runs at once."""

    max_num_seqs: int | None = flag()


@spread
def batch(
    context: typer.Context,
    source: Annotated[
        Path, typer.Argument(help="Requests, in OpenAI's batch format (JSON lines).")
    ],
    target: Annotated[
        Path, typer.Argument(help="Answers; requests that already have one here are skipped.")
    ],
    base_url: Annotated[
        str | None, _server(metavar="URL", help="The URL of the server to use.")
    ] = None,
    api_key: Annotated[str | None, _server(help=flags.API_KEY_HELP, envvar=API_KEY)] = None,
    timeout: Annotated[float, _server(help="Seconds to wait for an answer.")] = 600.0,
    model: Annotated[
        str | None,
        panel("Model")(
            "--model",
            "-m",
            help="The model's name on the server; without --base-url a checkpoint to load here.",
        ),
    ] = None,
    *,
    engine: flags.Engine,
    size: Size,
    concurrency: Annotated[int, typer.Option(help="Requests in flight at once.")] = 64,
) -> None:
    """Answer a file of requests, with a server or a model loaded here."""
    from diffray.cluster.cli.batch_backends import endpoint_answers, engine_answers
    from diffray.cluster.cli.batch_run import run_batch
    from diffray.cluster.cli.endpoint import Endpoint
    from diffray.cluster.control.engine_config import EngineConfig

    if base_url is not None:
        refuse_flags(context, "with --base-url", names_of(flags.Engine, Size))
        if not timeout > 0:
            raise ValueError(f"--timeout must be above 0 (given: {timeout:g})")
        endpoint = Endpoint.at(base_url, api_key)
        backend = endpoint_answers(endpoint, model=model, timeout=timeout)
    elif model is not None:
        refuse_flags(context, "without --base-url", ("api_key", "timeout"))
        backend = engine_answers(model, EngineConfig(**typed(engine), **typed(size)))
    else:
        raise ValueError("give --base-url URL of a server, or --model to load a model here")
    summary = run_batch(source, target, backend, concurrency=concurrency)
    typer.echo(str(summary), err=True)
    if summary.interrupted:
        raise typer.Exit(130)


def status(
    address: Annotated[
        str, typer.Option(help="HOST:PORT of a Ray cluster; auto: yours on this machine.")
    ] = "auto",
) -> None:
    """Show a Ray cluster's models, replicas and pending resources."""
    from diffray.cluster.cli.status import cluster_status

    typer.echo(cluster_status(address))
