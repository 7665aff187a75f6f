"""`diffray bench latency` and `diffray bench throughput`: an engine in this process, no server."""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from statistics import fmean
from typing import TYPE_CHECKING, Any

from tqdm import tqdm

from diffray.cluster.cli import flags
from diffray.cluster.cli.bench.datasets import Data, random_ids, read_sets, tasks
from diffray.cluster.cli.bench.results import Report, Result, Run, percentile, published, table
from diffray.cluster.cli.bench.sweep import counts
from diffray.cluster.cli.flag_records import flag, record, spread, typed
from diffray.cluster.cli.request_options import sampling_params
from diffray.workers.engine_options import EngineOptions

if TYPE_CHECKING:
    from rich.table import Table

    from diffray.cluster.cli.bench.datasets import Work
    from diffray.cluster.control.llm import Bar, DiffusionLLM
    from diffray.components.params import SamplingParams
    from diffray.workers.output import RequestOutput

MOST_AT_ONCE = 64
LOOKS = 2  # generations of `look_at`
PERCENTS = (10, 25, 50, 75, 90, 99)
SHORT_PROMPTS = Data(input_len=128)
_NUMBERS = {
    "requests": "{requests}",
    "tokens/s": "{tokens_per_second:.1f}",
    "tokens per forward": "{tokens_per_forward:.2f}",
    "forwards/s": "{forwards_per_second:.1f}",
    "step ms": "{step_ms:.2f}",
    "share of roofline": "{roofline_share:.1%}",
}


@record("Measuring", EngineOptions)
class Steps:
    steps_per_round: int | None = flag()


@record("Measuring")
class Timing:
    batch_size: str = flag(
        "8", metavar="N[,N...]", help="Requests per batch; several make a sweep."
    )
    num_iters_warmup: int = flag(2, min=0, help="Warm-up generations, not timed.")
    num_iters: int = flag(10, min=1, help="Timed generations.")


@record("Prompts")
class Lengths:
    input_len: int = flag(32, min=1, help="Tokens per random prompt.")
    output_len: int = flag(128, min=1, help="Tokens to generate per prompt.")
    seed: int = flag(0, help="The seed of prompts and sampling.")


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


def look_at(
    llm: "DiffusionLLM", run: Run, work: "Work", bandwidth: float, show: "Bar" = False
) -> Run:
    """Repeat some of a run's work to add where the time goes and how many bytes steps read."""
    from diffray.cluster.cli.bench.phases import phases_of
    from diffray.cluster.cli.bench.roofline import reads_of

    prompts, params = work
    with phases_of(llm.engine) as phases:
        llm.generate(list(prompts), params, use_tqdm=show)
    with reads_of(llm.engine) as reads:
        llm.generate(list(prompts), params, use_tqdm=show)
    whole, steps = sum(phases.seconds.values()) or 1.0, max(phases.forwards, 1)
    return run | {
        "split_share": {phase: took / whole for phase, took in phases.seconds.items()},
        "split_ms_per_step": {phase: 1e3 * t / steps for phase, t in phases.seconds.items()},
        "watched_step_ms": 1e3 * whole / steps,
        "bytes_per_step": reads.bytes_per_step,
        "memory_bandwidth": bandwidth,
        "roofline_share": 1e3 * reads.bytes_per_step / bandwidth / run["step_ms"],
    }


def tables(what: str, runs: Sequence[Run]) -> "list[Table]":
    """Return the numbers, then where the time went."""
    shown = [run | {"megabytes": run["bytes_per_step"] / 1e6} for run in runs]
    split = {
        f"{phase} ms": f"{{split_ms_per_step[{phase}]:.2f}} ({{split_share[{phase}]:.0%}})"
        for phase in runs[0]["split_share"]
    }
    more = {"watched step ms": "{watched_step_ms:.2f}", "MB read a step": "{megabytes:.1f}"}
    name = {what: "{name}"}
    return [table(name | _NUMBERS, shown), table(name | split | more, shown)]


def facts_of(
    llm: "DiffusionLLM", model: str, params: "SamplingParams", work: "dict[str, Work]"
) -> dict[str, str]:
    """Return the configuration of the engine and its requests, defaults included."""
    import torch

    from diffray.components.policy import Policy

    engine = llm.engine
    device, limits = engine.slots.device, engine.limits
    policy = Policy.resolve(params.diffusion, limits.spec)
    shared = engine.kv.prefixes.enabled and limits.spec.block_causal
    kind = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    return {
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


@contextmanager
def _progress(requests: int) -> "Iterator[Bar]":
    """Show the progress of all generations, on a terminal, with the time that is left."""
    with tqdm(total=requests, unit="request", leave=False, disable=None) as bar:
        yield lambda **_: nullcontext(bar)


@contextmanager
def _benchmark(
    title: str, what: str, result: Result, model: str, options: dict[str, Any]
) -> "Iterator[tuple[Report, DiffusionLLM, float]]":
    """Load the model; yield a report to fill, the engine, and the memory bandwidth."""
    from diffray.cluster.cli.bench.roofline import memory_bandwidth
    from diffray.cluster.control.llm import DiffusionLLM

    options = {"enable_prefix_caching": False} | options  # measuring repeats prompts
    with (
        published(title, result, partial(tables, what)) as report,
        DiffusionLLM(model, **options) as llm,
    ):
        report.facts["steps per round"] = str(EngineOptions(**options).steps_per_round)
        yield report, llm, memory_bandwidth(llm.engine.slots.device)


@spread
def latency(
    *,
    model: flags.Model = "demo",
    engine: flags.Engine,
    timing: Timing,
    steps: Steps,
    lengths: Lengths,
    sampling: flags.Sampling,
    diffusion: flags.Diffusion,
    result: Result,
) -> None:
    """Measure the latency of batches of random prompts.

    All answers have the same length.
    """
    sizes = counts(timing.batch_size, "--batch-size", high=MOST_AT_ONCE)
    params = sampling_params(
        sampling, diffusion, max_tokens=lengths.output_len, seed=lengths.seed, ignore_eos=True
    )
    options = typed(engine) | typed(steps) | {"max_num_seqs": max(sizes)}
    with _benchmark("latency of batches", "batch", result, model, options) as (report, llm, speed):
        prompts = random_ids(llm, max(sizes), lengths.input_len, lengths.seed)
        report.planned = len(sizes)
        report.facts |= facts_of(llm, model, params, {"a batch": (prompts, [params])})
        repeats = timing.num_iters_warmup + timing.num_iters + LOOKS
        with _progress(sum(sizes) * repeats) as show:
            for size in sizes:
                work = prompts[:size], [params] * size
                if timing.num_iters_warmup:
                    timed(llm, "", [work] * timing.num_iters_warmup, show)
                run = timed(llm, f"batch {size}", [work] * timing.num_iters, show)
                mean = fmean(run["latencies"])
                shares = {str(each): percentile(run["latencies"], each) for each in PERCENTS}
                tqdm.write(f"{run['name']}\nAvg latency: {mean} seconds")
                for percent, seconds in shares.items():
                    tqdm.write(f"{percent}% percentile latency: {seconds} seconds")
                more = {"batch_size": size, "avg_latency": mean, "percentiles": shares}
                report.runs.append(look_at(llm, run, work, speed, show) | more)


@spread
def throughput(
    *,
    model: flags.Model = "demo",
    engine: flags.BatchEngine,
    data: Data = SHORT_PROMPTS,
    raw: flags.Raw = False,
    steps: Steps,
    sampling: flags.Sampling,
    diffusion: flags.Diffusion,
    result: Result,
) -> None:
    """Measure the throughput over data sets.

    --max-num-seqs 1 runs one prompt at a time.
    """
    sets, ends = read_sets(data), data.ignore_eos or None
    params = sampling_params(
        sampling, diffusion, max_tokens=data.output_len, seed=data.seed, ignore_eos=ends
    )
    options = typed(engine) | typed(steps)
    with _benchmark("throughput", "task", result, model, options) as (report, llm, speed):
        at_once = llm.engine.limits.max_num_seqs
        work = tasks(llm, data, sets, params, raw=raw)
        report.planned = len(work)
        report.facts |= {"max num seqs": str(at_once)} | facts_of(llm, model, params, work)
        sizes = [len(prompts) for prompts, _ in work.values()]
        with _progress(sum(n + (1 + LOOKS) * min(n, at_once) for n in sizes)) as show:
            for task, (prompts, own) in work.items():
                few = prompts[:at_once], own[:at_once]
                timed(llm, "", [few], show)  # warm-up
                alone = [([prompt], [each]) for prompt, each in zip(prompts, own, strict=True)]
                run = timed(llm, task, alone if at_once == 1 else [(prompts, own)], show)
                tqdm.write(_rates(task, run))
                rate = run["requests"] / run["seconds"]
                more = {"elapsed_time": run["seconds"], "num_requests": run["requests"]}
                more |= {"total_num_tokens": run["prompt_tokens"] + run["tokens"]}
                more |= {"requests_per_second": rate}
                report.runs.append(look_at(llm, run, few, speed, show) | more)


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
