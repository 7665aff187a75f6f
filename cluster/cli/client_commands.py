"""`diffray chat`, `diffray batch` and `diffray status`: for those who have a server."""

from pathlib import Path
from typing import Annotated, ClassVar

import typer

from diffray.cluster.cli import flags
from diffray.cluster.cli.failures import one_sentence
from diffray.cluster.cli.flag_records import Flag, Options, names_of, refuse_flags, spread
from diffray.workers.engine_options import EngineOptions

_LOCAL = "http://127.0.0.1:8000"

BaseUrl = Annotated[
    str, typer.Option(help="The server's address, with or without /v1.", metavar="URL")
]
ApiKey = Annotated[
    str | None,
    typer.Option(help="The server's API key, if it wants one.", envvar="DIFFRAY_API_KEY"),
]


@spread
def chat(
    base_url: BaseUrl = _LOCAL,
    model: Annotated[
        str | None,
        typer.Option("--model", "-m", help="The model's name on the server; default: the first."),
    ] = None,
    api_key: ApiKey = None,
    system: Annotated[str | None, typer.Option(help="The system message.")] = None,
    max_tokens: flags.MaxTokens = None,
    *,
    sampling: flags.Sampling,
    seed: flags.Seed = None,
    stop: flags.Stop = None,
    diffusion: flags.Diffusion,
) -> None:
    """Talk to a server in the terminal, or line by line from stdin."""
    with one_sentence():
        from diffray.cluster.cli.chat import chat as talk
        from diffray.cluster.cli.endpoint import Endpoint
        from diffray.cluster.cli.request_options import request_options

        typed = flags.typed_request(
            sampling, diffusion, max_tokens=max_tokens, seed=seed, stop=stop
        )
        options = request_options(typed, diffusion.settings or ())
        talk(Endpoint.at(base_url, api_key), model=model, options=options, system=system)


class Room(Options):
    """How many requests an engine of this process takes."""

    model = EngineOptions
    panel = "Model"
    flags: ClassVar = {"max_num_seqs": Flag()}


@spread
def batch(
    context: typer.Context,
    source: Annotated[
        Path, typer.Argument(help="Requests, in OpenAI's batch format (JSON lines).")
    ],
    target: Annotated[
        Path, typer.Argument(help="Answers; requests that have one in it are skipped.")
    ],
    base_url: Annotated[str | None, typer.Option(help="The server to ask.", metavar="URL")] = None,
    api_key: ApiKey = None,
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
    *,
    engine: flags.Engine,
    room: Room,
) -> None:
    """Answer a file of requests, with a server or a model loaded here."""
    with one_sentence():
        from diffray.cluster.cli.batch_backends import endpoint_answers, engine_answers
        from diffray.cluster.cli.batch_run import run_batch

        if base_url is not None:
            from diffray.cluster.cli.endpoint import Endpoint

            refuse_flags(context, "with --base-url", names_of(flags.Engine, Room))
            if not timeout > 0:
                raise ValueError(f"--timeout must be above 0 (given: {timeout:g})")
            endpoint = Endpoint.at(base_url, api_key)
            answering = endpoint_answers(endpoint, model=model, timeout=timeout)
        elif model is not None:
            from diffray.cluster.control.engine_config import EngineConfig

            refuse_flags(context, "without --base-url", ("api_key", "timeout"))
            config = EngineConfig(**engine.typed(), **room.typed())
            answering = engine_answers(model, config)
        else:
            raise ValueError("give --base-url URL of a server, or --model for an engine of its own")
        summary = run_batch(source, target, answering, concurrency=concurrency)
        typer.echo(str(summary), err=True)
    if summary.interrupted:
        raise typer.Exit(130)


def status(
    address: Annotated[
        str, typer.Option(help="HOST:PORT of a Ray cluster; auto: yours on this machine.")
    ] = "auto",
) -> None:
    """Show a Ray cluster's models and replicas, and what waits."""
    with one_sentence():
        from diffray.cluster.cli.status import cluster_status

        typer.echo(cluster_status(address))
