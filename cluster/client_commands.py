"""`diffray chat`, `diffray batch` and `diffray status`: for those who have a server."""

from pathlib import Path
from typing import Annotated

import typer

from diffray.cluster import flags
from diffray.cluster.environment import prepare
from diffray.cluster.failures import one_sentence
from diffray.cluster.flag_records import spread

_LOCAL = "http://127.0.0.1:8000"

BaseUrl = Annotated[str, typer.Option(help="Of a server, with or without /v1.", metavar="URL")]
ApiKey = Annotated[
    str | None, typer.Option(help="For a server that wants one.", envvar="DIFFRAY_API_KEY")
]


@spread
def chat(
    base_url: BaseUrl = _LOCAL,
    model: Annotated[
        str | None, typer.Option("--model", "-m", help="Its name there; left out: the first.")
    ] = None,
    api_key: ApiKey = None,
    system: Annotated[str | None, typer.Option(help="How to answer.")] = None,
    max_tokens: flags.MaxTokens = None,
    *,
    sampling: flags.Sampling,
    seed: flags.Seed = None,
    stop: flags.Stop = None,
    diffusion: flags.Diffusion,
) -> None:
    """Talk to a server, in the terminal or line by line from stdin."""
    with one_sentence():
        from diffray.cluster.chat import chat as talk
        from diffray.cluster.endpoint import Endpoint
        from diffray.cluster.request_options import request_options

        typed = flags.typed_request(
            sampling, diffusion, max_tokens=max_tokens, seed=seed, stop=stop
        )
        options = request_options(typed, diffusion.settings or ())
        talk(Endpoint.at(base_url, api_key), model=model, options=options, system=system)


@spread
def batch(
    source: Annotated[Path, typer.Argument(help="Requests in OpenAI's batch format (JSON lines).")],
    target: Annotated[Path, typer.Argument(help="Answers; what is there is not asked again.")],
    base_url: Annotated[str | None, typer.Option(help="A server's address.", metavar="URL")] = None,
    api_key: ApiKey = None,
    model: Annotated[
        str | None,
        typer.Option("--model", "-m", help="Or a checkpoint, for an engine of its own."),
    ] = None,
    concurrency: Annotated[int, typer.Option(help="Requests under way at once.")] = 64,
    timeout: Annotated[float, typer.Option(help="Seconds for a server's answer.")] = 600.0,
    *,
    engine: flags.Engine,
    max_num_seqs: Annotated[int, typer.Option(help="Sequences that its engine runs at once.")] = 16,
) -> None:
    """Answer a file of requests, through a server or with an engine of its own."""
    with one_sentence():
        from diffray.cluster.answerers import endpoint_answers, engine_answers
        from diffray.cluster.batch import run_batch

        if base_url is not None and model is None:
            from diffray.cluster.endpoint import Endpoint

            answering = endpoint_answers(Endpoint.at(base_url, api_key), timeout=timeout)
        elif model is not None and base_url is None:
            from diffray.cluster.config import EngineConfig

            config = EngineConfig(max_num_seqs=max_num_seqs, **engine.typed())
            answering = engine_answers(model, config)
        else:
            raise ValueError("give --base-url URL of a server, or --model for an engine of its own")
        summary = run_batch(source, target, answering, concurrency=concurrency)
        typer.echo(str(summary), err=True)
    if summary.interrupted:
        raise typer.Exit(130)


def status(
    address: Annotated[
        str, typer.Option(help="Of a Ray cluster; auto: the one on this machine.")
    ] = "auto",
) -> None:
    """Show the applications of a Ray cluster, their replicas, and what waits for resources."""
    with one_sentence():
        prepare()
        from diffray.cluster.status import cluster_status

        typer.echo(cluster_status(address))
