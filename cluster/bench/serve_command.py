"""`diffray bench serve`: load on any OpenAI-compatible server, with vLLM's flags."""

from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

from diffray.cluster import flags
from diffray.cluster.bench import flags as own
from diffray.cluster.failures import one_sentence

_TARGET, _TRAFFIC, _RESULT = "Server", "Traffic", "Result"
_SEVERAL = ("--goodput", "--metadata", "--header")


class ManyValues(TyperCommand):
    """Takes several values after one flag, as vLLM does: --goodput ttft:9 e2el:99."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        spread: list[str] = []
        flag = ""
        for word in args:
            if word.startswith("-"):
                flag = word if word in _SEVERAL else ""
            elif flag and spread[-1] != flag:
                spread.append(flag)
            spread.append(word)
        return super().parse_args(ctx, spread)


def serve(
    backend: Annotated[
        str, typer.Option(help="openai or openai-chat.", rich_help_panel=_TARGET)
    ] = "openai",
    base_url: Annotated[
        str | None,
        typer.Option(metavar="URL", help="Instead of host and port.", rich_help_panel=_TARGET),
    ] = None,
    host: Annotated[str, typer.Option(rich_help_panel=_TARGET)] = "127.0.0.1",
    port: Annotated[int, typer.Option(rich_help_panel=_TARGET)] = 8000,
    endpoint: Annotated[
        str | None,
        typer.Option(help="Left out: the backend's own path.", rich_help_panel=_TARGET),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option("--model", "-m", help="Left out: the first.", rich_help_panel=_TARGET),
    ] = None,
    tokenizer: Annotated[
        str | None,
        typer.Option(
            metavar="MODEL",
            help="A checkpoint whose tokenizer counts; left out: the server's.",
            rich_help_panel=_TARGET,
        ),
    ] = None,
    api_key: Annotated[
        str | None,
        typer.Option(envvar=["DIFFRAY_API_KEY", "OPENAI_API_KEY"], rich_help_panel=_TARGET),
    ] = None,
    header: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME=VALUE", help="Repeatable.", rich_help_panel=_TARGET),
    ] = None,
    request_id_prefix: Annotated[
        str | None, typer.Option(help="Left out: a random one.", rich_help_panel=_TARGET)
    ] = None,
    ready_check_timeout_sec: Annotated[
        float, typer.Option(min=0, help="0: no check.", rich_help_panel=_TARGET)
    ] = 0.0,
    dataset_name: own.DatasetName = "random",
    dataset_path: own.DatasetPath = None,
    num_prompts: own.NumPrompts = 1000,
    input_len: own.InputLen = 1024,
    output_len: own.MaybeOutputLen = None,
    ignore_eos: own.IgnoreEos = False,
    seed: own.Seed = 0,
    request_rate: Annotated[
        str,
        typer.Option(
            metavar="RPS[,RPS...]",
            help="Requests a second, inf: all at once; several: a sweep.",
            rich_help_panel=_TRAFFIC,
        ),
    ] = "inf",
    burstiness: Annotated[
        float,
        typer.Option(help="Shape of the gamma distribution; 1: Poisson.", rich_help_panel=_TRAFFIC),
    ] = 1.0,
    max_concurrency: Annotated[
        str | None,
        typer.Option(
            metavar="N[,N...]",
            help="Requests under way at once; several: a sweep.",
            rich_help_panel=_TRAFFIC,
        ),
    ] = None,
    num_warmups: Annotated[
        int, typer.Option(min=0, help="Before the clock.", rich_help_panel=_TRAFFIC)
    ] = 0,
    ramp_up_strategy: Annotated[
        str | None, typer.Option(help="linear or exponential.", rich_help_panel=_TRAFFIC)
    ] = None,
    ramp_up_start_rps: Annotated[float | None, typer.Option(rich_help_panel=_TRAFFIC)] = None,
    ramp_up_end_rps: Annotated[float | None, typer.Option(rich_help_panel=_TRAFFIC)] = None,
    temperature: flags.Temperature = None,
    top_p: flags.TopP = None,
    top_k: flags.TopK = None,
    min_p: Annotated[float | None, typer.Option(rich_help_panel="Request")] = None,
    frequency_penalty: Annotated[float | None, typer.Option(rich_help_panel="Request")] = None,
    presence_penalty: Annotated[float | None, typer.Option(rich_help_panel="Request")] = None,
    repetition_penalty: Annotated[float | None, typer.Option(rich_help_panel="Request")] = None,
    logprobs: Annotated[int | None, typer.Option(rich_help_panel="Request")] = None,
    extra_body: Annotated[
        str | None,
        typer.Option(metavar="JSON", help="Into each request.", rich_help_panel="Request"),
    ] = None,
    block_length: flags.BlockLength = None,
    decoder: flags.Decoder = None,
    cache: flags.Cache = None,
    iteration: flags.Iteration = None,
    settings: flags.Settings = None,
    percentile_metrics: Annotated[
        str,
        typer.Option(
            help="Of ttft, tpot, itl, e2el, client_queue_time, e2el_including_client_queue.",
            rich_help_panel=_RESULT,
        ),
    ] = "ttft,tpot,itl",
    metric_percentiles: Annotated[str, typer.Option(rich_help_panel=_RESULT)] = "99",
    goodput: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME:MS",
            help="What a good request keeps to: ttft, tpot, e2el.",
            rich_help_panel=_RESULT,
        ),
    ] = None,
    save_result: Annotated[bool, typer.Option("--save-result", rich_help_panel=_RESULT)] = False,
    save_detailed: Annotated[
        bool,
        typer.Option(
            "--save-detailed", help="With the numbers of each request.", rich_help_panel=_RESULT
        ),
    ] = False,
    append_result: Annotated[
        bool,
        typer.Option("--append-result", help="To what is in the file.", rich_help_panel=_RESULT),
    ] = False,
    result_dir: Annotated[Path | None, typer.Option(rich_help_panel=_RESULT)] = None,
    result_filename: Annotated[str | None, typer.Option(rich_help_panel=_RESULT)] = None,
    label: Annotated[
        str | None, typer.Option(help="Left out: the backend.", rich_help_panel=_RESULT)
    ] = None,
    metadata: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME=VALUE", help="Into the result.", rich_help_panel=_RESULT),
    ] = None,
    disable_tqdm: Annotated[bool, typer.Option("--disable-tqdm", rich_help_panel=_RESULT)] = False,
    report: own.Report = None,
) -> None:
    """Send requests to a server, as fast or as often as told, and tell how it bears them."""
    with one_sentence():
        from diffray.cluster.bench.machine import when_and_where
        from diffray.cluster.bench.plan import Plan
        from diffray.cluster.bench.result_file import Saving
        from diffray.cluster.bench.serving import run_plan

        typed = {
            "temperature": temperature,
            "top_p": top_p,
            "top_k": top_k,
            "min_p": min_p,
            "frequency_penalty": frequency_penalty,
            "presence_penalty": presence_penalty,
            "repetition_penalty": repetition_penalty,
            "ignore_eos": ignore_eos or None,
            "block_length": block_length,
            "decoder.kind": decoder,
            "cache.kind": cache,
            "iteration.kind": iteration,
        }
        facts = when_and_where()
        plan = Plan.of(
            backend=backend,
            url=base_url or f"http://{host}:{port}",
            endpoint=endpoint,
            model=model,
            tokenizer=tokenizer,
            api_key=api_key,
            headers=header or [],
            id_prefix=request_id_prefix,
            ready_timeout=ready_check_timeout_sec,
            dataset=dataset_name,
            path=dataset_path,
            count=num_prompts,
            input_len=input_len,
            output_len=output_len,
            seed=seed,
            rates=request_rate,
            burstiness=burstiness,
            concurrencies=max_concurrency,
            warmups=num_warmups,
            ramp=(ramp_up_strategy, ramp_up_start_rps, ramp_up_end_rps),
            typed=typed | _logprobs(logprobs, backend),
            settings=settings or [],
            extra_body=extra_body,
            metrics=percentile_metrics,
            percents=metric_percentiles,
            goodput=goodput or [],
            progress=not disable_tqdm,
        )
        saving = Saving.of(
            save=save_result,
            detailed=save_detailed,
            append=append_result,
            folder=result_dir,
            filename=result_filename,
            label=label or backend,
            metadata=metadata or [],
        )
        found = run_plan(plan, saving, typer.echo)
        if report is not None:
            from diffray.cluster.bench.report import serving_report

            report.write_text(serving_report(facts, plan.facts(), found))


def _logprobs(count: int | None, backend: str) -> dict[str, object]:
    """Return how the endpoint is asked for a token's most probable ids."""
    if count is None or backend == "openai":
        return {"logprobs": count}
    return {"logprobs": True, "top_logprobs": count}
