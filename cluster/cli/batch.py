"""`diffray batch`, and what answers its requests: a running server, or an engine here."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager, closing
from pathlib import Path
from typing import Annotated, Any

import httpx2
import typer

from diffray.cluster.api.batch_lines import CHAT, Answer, Reply, Unanswered
from diffray.cluster.cli import flags
from diffray.cluster.cli.batch_run import run_batch
from diffray.cluster.cli.commands import refuse
from diffray.cluster.cli.endpoint import Endpoint, complaint, json_of, reason, retry_after
from diffray.cluster.control.engine_config import EngineConfig
from diffray.cluster.serve.address import API_KEY
from diffray.components.config import counted

RECONNECTS = 6  # with pauses of 1, 2, 4, ... seconds, long enough for a server to restart
BREAKS = 3  # how often a connection may break under one request


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


@asynccontextmanager
async def endpoint_answers(
    endpoint: Endpoint,
    *,
    model: str | None = None,
    timeout: float = 600.0,
    first_pause: float = 1.0,
) -> AsyncGenerator[Answer, None]:
    """Answer over HTTP within `timeout` seconds; `model` overrides the model in the requests."""
    async with httpx2.AsyncClient(**endpoint.options(timeout)) as client:

        async def post(url: str, body: dict[str, Any]) -> httpx2.Response:
            """Send a request; retry if the connection fails, as the server may be restarting."""
            refused = broken = 0
            while True:
                try:
                    return await client.post(url, json=body)
                except (httpx2.ConnectError, httpx2.ConnectTimeout):
                    refused += 1
                    if refused == RECONNECTS:
                        raise endpoint.unreachable() from None
                    await asyncio.sleep(first_pause * 2 ** (refused - 1))
                except httpx2.TimeoutException:
                    raise Unanswered("timeout", f"no answer within {timeout:g} s") from None
                except httpx2.TransportError as error:
                    broken += 1
                    if broken == BREAKS:
                        text = f"the connection broke {BREAKS} times: {reason(error)}"
                        raise Unanswered("connection_error", text) from None
                    await asyncio.sleep(first_pause)

        async def answer(url: str, body: dict[str, Any]) -> Reply:
            response = await post(url, body if model is None else body | {"model": model})
            found = json_of(response)
            if response.status_code in (401, 403):
                raise ConnectionRefusedError(complaint(found, response.status_code))
            name = response.headers.get("x-request-id", "")
            if not name and isinstance(found, dict):
                name = str(found.get("id", ""))
            return Reply(response.status_code, name, found, retry_after(response))

        yield answer


@asynccontextmanager
async def engine_answers(model: str, config: EngineConfig) -> AsyncGenerator[Answer, None]:
    """Load a model into this process and give the replies that a server would give."""
    from diffray.cluster.api.errors import ApiError
    from diffray.cluster.api.service import Service
    from diffray.cluster.api.settings import read_generation_defaults
    from diffray.cluster.control.engine_client import EngineFailed
    from diffray.cluster.control.local import load_local
    from diffray.components.checkpoints.folder import resolve
    from diffray.workers.adapters import LoadedAdapters

    engine, tokenizer = load_local(model, config)
    service = Service(
        engine,
        tokenizer,
        (model,),
        defaults=read_generation_defaults(resolve(model)),
        adapters=LoadedAdapters.of(model, config.lora_modules, config.max_lora_rank, (model,)),
        scheduling_policy=config.scheduling_policy,
    )

    async def answer(url: str, body: dict[str, Any]) -> Reply:
        try:
            made = await (service.chat if url == CHAT else service.complete)(body)
        except ApiError as error:
            try:
                await engine.check_health()
            except EngineFailed as failure:
                raise ConnectionAbortedError(str(failure)) from None
            return Reply(error.status, "", error.body, error.retry_after)
        return Reply(200, str(made["id"]), made)

    with engine, closing(service):
        yield answer
