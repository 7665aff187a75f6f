"""The flags of `diffray bench serve`: those of `vllm bench serve`."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

_TARGET, _TRAFFIC, _REQUEST, _RESULT = "Server", "Traffic", "Request", "Result"


@dataclass(frozen=True, slots=True)
class Server:
    """Which server is asked, and how."""

    backend: Annotated[
        str | None,
        typer.Option(
            help="openai or openai-chat; left out: as --endpoint says, else openai for random "
            "prompts alone and openai-chat for all others.",
            rich_help_panel=_TARGET,
        ),
    ] = None
    base_url: Annotated[
        str | None,
        typer.Option(
            metavar="URL",
            help="The server's address, instead of --host and --port.",
            rich_help_panel=_TARGET,
        ),
    ] = None
    host: Annotated[str, typer.Option(help="The server's host.", rich_help_panel=_TARGET)] = (
        "127.0.0.1"
    )
    port: Annotated[int, typer.Option(help="The server's port.", rich_help_panel=_TARGET)] = 8000
    endpoint: Annotated[
        str | None,
        typer.Option(help="The path to ask; default: the backend's own.", rich_help_panel=_TARGET),
    ] = None
    model: Annotated[
        str | None,
        typer.Option(
            "--model",
            "-m",
            help="The model's name on the server; default: the first.",
            rich_help_panel=_TARGET,
        ),
    ] = None
    tokenizer: Annotated[
        str | None,
        typer.Option(
            metavar="MODEL",
            help="A checkpoint whose tokenizer counts tokens; default: the server's.",
            rich_help_panel=_TARGET,
        ),
    ] = None
    api_key: Annotated[
        str | None,
        typer.Option(
            help="The server's API key, if it wants one.",
            envvar=["DIFFRAY_API_KEY", "OPENAI_API_KEY"],
            rich_help_panel=_TARGET,
        ),
    ] = None
    header: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=VALUE", help="A header to send; repeatable.", rich_help_panel=_TARGET
        ),
    ] = None
    request_id_prefix: Annotated[
        str | None,
        typer.Option(help="What request ids begin with; default: random.", rich_help_panel=_TARGET),
    ] = None
    ready_check_timeout_sec: Annotated[
        float,
        typer.Option(
            min=0,
            help="Seconds to wait until the server is ready; 0: do not check.",
            rich_help_panel=_TARGET,
        ),
    ] = 0.0

    @property
    def url(self) -> str:
        return self.base_url or f"http://{self.host}:{self.port}"


@dataclass(frozen=True, slots=True)
class Traffic:
    """When requests are sent."""

    request_rate: Annotated[
        str,
        typer.Option(
            metavar="RPS[,RPS...]",
            help="Requests per second; inf: all at once; several make a sweep.",
            rich_help_panel=_TRAFFIC,
        ),
    ] = "inf"
    burstiness: Annotated[
        float,
        typer.Option(
            help="The shape of the gamma distribution of arrivals; 1: Poisson.",
            rich_help_panel=_TRAFFIC,
        ),
    ] = 1.0
    max_concurrency: Annotated[
        str | None,
        typer.Option(
            metavar="N[,N...]",
            help="The most requests in flight; several make a sweep.",
            rich_help_panel=_TRAFFIC,
        ),
    ] = None
    num_warmups: Annotated[
        int, typer.Option(min=0, help="Warm-up requests, not timed.", rich_help_panel=_TRAFFIC)
    ] = 0
    ramp_up_strategy: Annotated[
        str | None,
        typer.Option(
            help="Ramp the request rate up: linear or exponential.", rich_help_panel=_TRAFFIC
        ),
    ] = None
    ramp_up_start_rps: Annotated[
        float | None, typer.Option(help="The first request rate.", rich_help_panel=_TRAFFIC)
    ] = None
    ramp_up_end_rps: Annotated[
        float | None, typer.Option(help="The last request rate.", rich_help_panel=_TRAFFIC)
    ] = None


@dataclass(frozen=True, slots=True)
class Wishes:
    """What else is asked in each request's body; it is the server that judges it."""

    min_p: Annotated[
        float | None, typer.Option(help="Sent as given.", rich_help_panel=_REQUEST)
    ] = None
    frequency_penalty: Annotated[
        float | None, typer.Option(help="Sent as given.", rich_help_panel=_REQUEST)
    ] = None
    presence_penalty: Annotated[
        float | None, typer.Option(help="Sent as given.", rich_help_panel=_REQUEST)
    ] = None
    repetition_penalty: Annotated[
        float | None, typer.Option(help="Sent as given.", rich_help_panel=_REQUEST)
    ] = None
    logprobs: Annotated[
        int | None, typer.Option(help="Ask for so many per token.", rich_help_panel=_REQUEST)
    ] = None
    extra_body: Annotated[
        str | None,
        typer.Option(
            metavar="JSON", help="Fields to add to each request's body.", rich_help_panel=_REQUEST
        ),
    ] = None

    def typed(self, backend: str) -> dict[str, object]:
        """Return what was typed under a request's names, but the extra body."""
        found: dict[str, object] = {
            "min_p": self.min_p,
            "frequency_penalty": self.frequency_penalty,
            "presence_penalty": self.presence_penalty,
            "repetition_penalty": self.repetition_penalty,
            "logprobs": self.logprobs,
        }
        if self.logprobs is not None and backend != "openai":  # chats say it in two fields
            found |= {"logprobs": True, "top_logprobs": self.logprobs}
        return found


@dataclass(frozen=True, slots=True)
class Telling:
    """What is told of the numbers."""

    percentile_metrics: Annotated[
        str,
        typer.Option(
            help="Metrics to report percentiles of: ttft, tpot, itl, e2el, client_queue_time, "
            "e2el_including_client_queue.",
            rich_help_panel=_RESULT,
        ),
    ] = "ttft,tpot,itl"
    metric_percentiles: Annotated[
        str, typer.Option(help="Percentiles to report.", rich_help_panel=_RESULT)
    ] = "99"
    goodput: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME:MS",
            help="Count requests within these limits (ttft, tpot, e2el, in ms) as good.",
            rich_help_panel=_RESULT,
        ),
    ] = None


@dataclass(frozen=True, slots=True)
class Keeping:
    """Where the numbers are kept."""

    save_result: Annotated[
        bool,
        typer.Option("--save-result", help="Save the results as JSON.", rich_help_panel=_RESULT),
    ] = False
    save_detailed: Annotated[
        bool,
        typer.Option(
            "--save-detailed", help="Save the numbers of each request too.", rich_help_panel=_RESULT
        ),
    ] = False
    append_result: Annotated[
        bool,
        typer.Option(
            "--append-result",
            help="Append to the file instead of replacing it.",
            rich_help_panel=_RESULT,
        ),
    ] = False
    result_dir: Annotated[
        Path | None, typer.Option(help="The folder for results.", rich_help_panel=_RESULT)
    ] = None
    result_filename: Annotated[
        str | None, typer.Option(help="The file for results.", rich_help_panel=_RESULT)
    ] = None
    label: Annotated[
        str | None,
        typer.Option(help="A name for the results; default: the backend.", rich_help_panel=_RESULT),
    ] = None
    metadata: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=VALUE", help="Fields to add to the results.", rich_help_panel=_RESULT
        ),
    ] = None
