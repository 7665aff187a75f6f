"""`diffray bench latency` and `diffray bench throughput`: an engine in this process, no server."""

import json
import os
import platform
import shlex
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from datetime import UTC, datetime
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Annotated, Any

import typer
from tqdm import tqdm

import diffray
from diffray.cluster.cli import flags
from diffray.cluster.cli.commands import Fields, Given
from diffray.cluster.cli.datasets import RANDOM, Data, random_ids, read_sets, tasks
from diffray.cluster.cli.flags import sampling_params
from diffray.workers.engine_options import EngineOptions

if TYPE_CHECKING:
    from diffray.cluster.cli.datasets import Work
    from diffray.cluster.control.llm import Bar, DiffusionLLM
    from diffray.cluster.frontend.output import RequestOutput
    from diffray.components.params import SamplingParams

Run = dict[str, Any]  # a run's numbers, by their names in JSON
MOST_AT_ONCE = 64
PERCENTS = (10, 25, 50, 75, 90, 99)
_COLUMNS = {
    "": "{name}",
    "requests": "{requests}",
    "tokens/s": "{tokens_per_second:.1f}",
    "tokens per forward": "{tokens_per_forward:.2f}",
    "forwards/s": "{forwards_per_second:.1f}",
    "step ms": "{step_ms:.2f}",
}
_RANDOM_WORK = (
    "Random prompts understate what decoders with a threshold reach; for real questions use "
    "`diffray bench throughput --dataset-name demo` (or chat, humaneval, gsm8k)."
)
_WIDTH = 120  # of a table that goes to a file or a pipe
_INTERRUPTED = 130  # the exit status by which shells report SIGINT

_STEPS = Fields(EngineOptions, "Engine", "steps_per_round")
Prompts = Annotated[
    Given,
    Fields(
        Data,
        "Prompts",
        *("num_prompts", "input_len", "random_prefix_len", "output_len", "seed", "dataset_path"),
        dataset_name=typer.Option(metavar="NAME[,NAME...]"),
        ignore_eos=typer.Option("--ignore-eos"),
    ),
]
Result = Annotated[
    Path | None, typer.Option(metavar="OUT.json", help="Write the results to this file.")
]


def sizes_of(text: str) -> list[int]:
    """Return the batch sizes of a comma-separated list."""
    try:
        found = [int(part) for part in text.split(",")]
    except ValueError:
        found = []
    if not found or not all(1 <= each <= MOST_AT_ONCE for each in found):
        raise ValueError(
            f"--batch-size {text!r} is not a list of numbers from 1 to {MOST_AT_ONCE}, such as 1,8"
        )
    return found


def percentile(values: Sequence[float], percent: float) -> float:
    """Return the percentile, interpolated between the two nearest values; 0 for none."""
    import numpy as np

    return float(np.percentile(values, percent)) if values else 0.0


def counted(output: "RequestOutput", eos_token_ids: Sequence[int], *, ignore_eos: bool) -> int:
    """Return an answer's tokens before its first end token; all where end tokens are ignored."""
    ids = output.outputs[0].token_ids
    if ignore_eos:
        return len(ids)
    return next((place for place, id in enumerate(ids) if id in eos_token_ids), len(ids))


def timed(llm: "DiffusionLLM", name: str, batches: "Sequence[Work]", show: "Bar" = False) -> Run:
    """Generate batch after batch, and return the numbers of the run.

    Tokens are those before the first end token; the time includes the prompts. A forward that
    sequences share counts once in `forwards`. Tokens per forward and `sequence_rate` are averages
    over sequences; the latter is known only if sequences ran one by one.
    """
    engine = llm.engine
    before = engine.forwards
    latencies: list[float] = []
    prompt_tokens, tokens, per_forward = 0, list[int](), list[float]()
    for prompts, params in batches:
        begin = time.perf_counter()
        found = llm.generate(list(prompts), params, use_tqdm=show)
        latencies.append(time.perf_counter() - begin)
        for output, own in zip(found, params, strict=True):
            tokens.append(counted(output, engine.eos_token_ids, ignore_eos=own.ignore_eos))
            per_forward.append(tokens[-1] / max(output.forwards, 1))
            prompt_tokens += output.prompt_tokens
    seconds, forwards = sum(latencies), engine.forwards - before
    run = {
        "name": name,
        "requests": len(tokens),
        "prompt_tokens": prompt_tokens,
        "tokens": sum(tokens),
        "forwards": forwards,
        "seconds": seconds,
        "tokens_per_forward": fmean(per_forward),
        "latencies": latencies,
        "sequence_rate": None,
        "tokens_per_second": sum(tokens) / seconds,
        "forwards_per_second": forwards / seconds,
        "step_ms": 1e3 * seconds / max(forwards, 1),
    }
    if len(tokens) == len(latencies):
        run["sequence_rate"] = fmean(n / s for n, s in zip(tokens, latencies, strict=True))
    return run


def facts_of(
    llm: "DiffusionLLM", model: str, params: "SamplingParams", work: "dict[str, Work]"
) -> dict[str, str]:
    """Return the machine, and the engine's and requests' configuration, defaults included."""
    import torch

    from diffray.components.policy import Policy

    engine = llm.engine
    device, limits = engine.slots.device, engine.limits
    policy = Policy.resolve(params.diffusion, limits.spec)
    shared = engine.kv.prefixes.enabled and limits.spec.block_causal
    kind = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    return {
        "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "command": shlex.join(["diffray", *sys.argv[1:]]),
        "diffray": diffray.__version__,
        "machine": f"{_processor()}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}",
        "model": model,
        "device": f"{kind}, {torch.get_num_threads()} threads",
        "dtype": str(engine.kv.dtype).removeprefix("torch."),
        "prefix caching": "on" if shared else "off",
        "torch": torch.__version__,
        "block length": str(policy.block_length),
        "decoder": policy.decoder.model_dump_json(),
        "iteration": policy.iteration.model_dump_json(),
        "cache": policy.cache.model_dump_json(),
        "cfg scale": f"{policy.cfg_scale:g}",
    } | {
        f"requests of {name}": f"{len(prompts)}, prompts of {_span(map(len, prompts))} tokens, "
        f"max_tokens {_span(each.max_tokens for each in params)}"
        for name, (prompts, params) in work.items()
    }


def _span(values: Any) -> str:
    found = sorted(values)
    return str(found[0]) if found[0] == found[-1] else f"{found[0]} to {found[-1]}"


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.machine())


@contextmanager
def _progress(requests: int) -> "Iterator[Bar]":
    """Show the progress of all generations, on a terminal, with the time that is left."""
    with tqdm(total=requests, unit="request", leave=False, disable=None) as bar:
        yield lambda **_: nullcontext(bar)


@contextmanager
def _loaded(model: str, options: dict[str, Any]) -> "Iterator[DiffusionLLM]":
    from diffray.cluster.control.llm import DiffusionLLM

    # Measuring repeats prompts.
    with DiffusionLLM(model, **{"enable_prefix_caching": False} | options) as llm:
        yield llm


@contextmanager
def _published(
    output_json: Path | None, facts: dict[str, str], planned: int
) -> Iterator[list[Run]]:
    """Print the runs that the block adds to the list, and write them to the file.

    After Ctrl-C, those that have finished.
    """
    from rich.console import Console
    from rich.table import Table

    runs: list[Run] = []
    interrupted = ""
    try:
        yield runs
    except KeyboardInterrupt:
        interrupted = f"interrupted after {len(runs)} of {planned} runs"
    if runs:
        table = Table(*_COLUMNS)
        for run in runs:
            table.add_row(*(form.format(**run) for form in _COLUMNS.values()))
        console = Console()
        (console if console.is_terminal else Console(width=_WIDTH)).print(table)
    if output_json is not None:
        facts |= {"interrupted": interrupted} if interrupted else {}
        text = json.dumps({"facts": facts, "runs": runs}, indent=1)
        output_json.write_text(f"{text}\n")
    if interrupted:
        typer.echo(f"diffray: {interrupted}", err=True)
        raise typer.Exit(_INTERRUPTED)
    if any("batch_size" in run or run["name"] == RANDOM for run in runs):
        typer.echo(_RANDOM_WORK, err=True)


def _check(path: Path | None) -> None:
    """Refuse a file that cannot be written, before spending hours on its content."""
    if path is not None and path.is_dir():
        raise ValueError(f"--output-json {path} is a folder; name a file in it")
    if path is not None and not path.parent.is_dir():
        raise ValueError(f"--output-json {path}: there is no folder {path.parent}; make it first")


def latency(
    *,
    model: flags.Model = "demo",
    engine: Annotated[flags.Engine, _STEPS],
    batch_size: Annotated[
        str, typer.Option(metavar="N[,N...]", help="Requests per batch; several make a sweep.")
    ] = "8",
    num_iters_warmup: Annotated[
        int, typer.Option(min=0, help="Warm-up generations, not timed.")
    ] = 2,
    num_iters: Annotated[int, typer.Option(min=1, help="Timed generations.")] = 10,
    input_len: Annotated[int, typer.Option(min=1, help="Tokens per random prompt.")] = 32,
    output_len: Annotated[int, typer.Option(min=1, help="Tokens to generate per prompt.")] = 128,
    seed: Annotated[int, typer.Option(help="The seed of prompts and sampling.")] = 0,
    sampling: flags.Sampling,
    diffusion: flags.Diffusion,
    settings: flags.Settings = None,
    output_json: Result = None,
) -> None:
    """Measure the latency of batches of random prompts.

    All answers have the same length.
    """
    _check(output_json)
    sizes = sizes_of(batch_size)
    fixed = {"max_tokens": output_len, "seed": seed, "ignore_eos": True}
    params = sampling_params(sampling | diffusion | fixed, settings)
    with _loaded(model, engine | {"max_num_seqs": max(sizes)}) as llm:
        prompts = random_ids(llm, max(sizes), input_len, seed)
        facts = facts_of(llm, model, params, {"a batch": (prompts, [params])})
        repeats = num_iters_warmup + num_iters
        with (
            _published(output_json, facts, len(sizes)) as runs,
            _progress(sum(sizes) * repeats) as show,
        ):
            for size in sizes:
                work = prompts[:size], [params] * size
                if num_iters_warmup:
                    timed(llm, "", [work] * num_iters_warmup, show)
                run = timed(llm, f"batch {size}", [work] * num_iters, show)
                mean = fmean(run["latencies"])
                shares = {str(each): percentile(run["latencies"], each) for each in PERCENTS}
                tqdm.write(f"{run['name']}\nAvg latency: {mean} seconds")
                for percent, seconds in shares.items():
                    tqdm.write(f"{percent}% percentile latency: {seconds} seconds")
                runs.append(run | {"batch_size": size, "avg_latency": mean, "percentiles": shares})


def throughput(
    *,
    model: flags.Model = "demo",
    engine: Annotated[flags.BatchEngine, _STEPS],
    prompts: Prompts,
    raw: flags.Raw = False,
    sampling: flags.Sampling,
    diffusion: flags.Diffusion,
    settings: flags.Settings = None,
    output_json: Result = None,
) -> None:
    """Measure the throughput over data sets.

    --max-num-seqs 1 runs one prompt at a time.
    """
    _check(output_json)
    data = Data(**prompts)
    sets = read_sets(data)
    ends = data.ignore_eos or None
    fixed = {"max_tokens": data.output_len, "seed": data.seed, "ignore_eos": ends}
    params = sampling_params(sampling | diffusion | fixed, settings)
    with _loaded(model, engine) as llm:
        at_once = llm.engine.limits.max_num_seqs
        work = tasks(llm, data, sets, params, raw=raw)
        facts = {"max num seqs": str(at_once)} | facts_of(llm, model, params, work)
        sizes = [len(asked) for asked, _ in work.values()]
        with (
            _published(output_json, facts, len(work)) as runs,
            _progress(sum(n + min(n, at_once) for n in sizes)) as show,
        ):
            for task, (asked, own) in work.items():
                timed(llm, "", [(asked[:at_once], own[:at_once])], show)  # warm-up
                alone = [([prompt], [each]) for prompt, each in zip(asked, own, strict=True)]
                run = timed(llm, task, alone if at_once == 1 else [(asked, own)], show)
                tqdm.write(_rates(task, run))
                runs.append(
                    run
                    | {"elapsed_time": run["seconds"], "num_requests": run["requests"]}
                    | {"total_num_tokens": run["prompt_tokens"] + run["tokens"]}
                    | {"requests_per_second": run["requests"] / run["seconds"]}
                )


def _rates(task: str, run: Run) -> str:
    seconds = run["seconds"]
    text = (
        f"{task}\nThroughput: {run['requests'] / seconds:.2f} requests/s, "
        f"{(run['prompt_tokens'] + run['tokens']) / seconds:.2f} total tokens/s, "
        f"{run['tokens_per_second']:.2f} output tokens/s"
    )
    if run["sequence_rate"] is None:
        return text
    return f"{text}\nMean of each sequence's tokens/s: {run['sequence_rate']:.2f}"
