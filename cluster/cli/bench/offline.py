"""`diffray bench latency` and `diffray bench throughput`: an engine in this process, no server."""

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from statistics import fmean
from typing import TYPE_CHECKING, Any

import typer

from diffray.cluster.cli import flags
from diffray.cluster.cli.bench import flags as own
from diffray.cluster.cli.bench.datasets import random_ids, read_sets, tasks
from diffray.cluster.cli.bench.results import (
    interruptible,
    percentile,
    publish,
    table,
    when_and_where,
)
from diffray.cluster.cli.failures import one_sentence
from diffray.cluster.cli.flag_records import spread

if TYPE_CHECKING:
    from diffray.cluster.cli.bench.datasets import Work
    from diffray.cluster.control.llm import DiffusionLLM
    from diffray.components.params import SamplingParams
    from diffray.workers.output import RequestOutput

MOST_AT_ONCE = 64
PERCENTS = (10, 25, 50, 75, 90, 99)
EACH_ITS_OWN = flags.Engine(enable_prefix_caching=False)  # prompts are repeated, for their time
SHORT_PROMPTS = own.Data(input_len=128)


@dataclass(frozen=True, slots=True)
class Run:
    """Timed generations of one kind, and what a second look at some of the same work found.

    Tokens are those before the first end token, and the time includes the prompts'. A forward that
    sequences share counts once in `forwards`; tokens per forward are a sequence's own, averaged
    over sequences, as is `sequence_rate`, known where sequences ran one by one.
    """

    name: str
    requests: int
    prompt_tokens: int
    tokens: int
    forwards: int
    seconds: float
    tokens_per_forward: float
    latencies: tuple[float, ...]
    sequence_rate: float | None = None

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds

    @property
    def step_seconds(self) -> float:
        return self.seconds / max(self.forwards, 1)


def counted(output: "RequestOutput", eos_token_ids: Sequence[int], *, ignore_eos: bool) -> int:
    """Return an answer's tokens before its first end token; all where end tokens are ignored."""
    ids = output.outputs[0].token_ids
    if ignore_eos:
        return len(ids)
    return next((place for place, id in enumerate(ids) if id in eos_token_ids), len(ids))


def timed(
    llm: "DiffusionLLM",
    name: str,
    batches: Sequence[list[list[int]]],
    params: "Sequence[list[SamplingParams]]",
) -> Run:
    """Generate batch after batch; each is waited for before the next begins."""
    engine = llm.engine
    before = engine.forwards
    latencies, rates, prompt_tokens = [], [], 0
    tokens_each: list[int] = []
    per_forward: list[float] = []
    for prompts, wishes in zip(batches, params, strict=True):
        begin = time.perf_counter()
        found = llm.generate(list(prompts), wishes, use_tqdm=False)
        latencies.append(time.perf_counter() - begin)
        for output, wish in zip(found, wishes, strict=True):
            tokens = counted(output, engine.eos_token_ids, ignore_eos=wish.ignore_eos)
            prompt_tokens += output.prompt_tokens
            tokens_each.append(tokens)
            per_forward.append(tokens / max(output.forwards, 1))
        if len(found) == 1:
            rates.append(tokens_each[-1] / latencies[-1])
    return Run(
        name=name,
        requests=len(tokens_each),
        prompt_tokens=prompt_tokens,
        tokens=sum(tokens_each),
        forwards=engine.forwards - before,
        seconds=sum(latencies),
        tokens_per_forward=fmean(per_forward),
        latencies=tuple(latencies),
        sequence_rate=fmean(rates) if len(rates) == len(tokens_each) else None,
    )


def look_at(llm: "DiffusionLLM", run: Run, work: "Work", bandwidth: float) -> dict[str, Any]:
    """Do some of a run's work twice more, for its phases and its bytes; return all its numbers."""
    from diffray.cluster.cli.bench.phases import phases_of
    from diffray.cluster.cli.bench.roofline import reads_of

    prompts, params = work
    with phases_of(llm.engine) as phases:
        llm.generate(list(prompts), params, use_tqdm=False)
    with reads_of(llm.engine) as reads:
        llm.generate(list(prompts), params, use_tqdm=False)
    whole, steps = sum(phases.seconds.values()) or 1.0, max(phases.forwards, 1)
    return asdict(run) | {
        "tokens_per_second": run.tokens_per_second,
        "forwards_per_second": run.forwards / run.seconds,
        "step_ms": 1e3 * run.step_seconds,
        "split_share": {phase: took / whole for phase, took in phases.seconds.items()},
        "split_ms_per_step": {phase: 1e3 * t / steps for phase, t in phases.seconds.items()},
        "watched_step_ms": 1e3 * whole / steps,
        "bytes_per_step": reads.bytes_per_step,
        "memory_bandwidth": bandwidth,
        "roofline_share": reads.bytes_per_step / bandwidth / run.step_seconds,
    }


def tables(runs: Sequence[dict[str, Any]], what: str) -> list[Any]:
    """Return the numbers, then where the time went."""
    numbers = [
        [
            run["name"],
            str(run["requests"]),
            f"{run['tokens_per_second']:.1f}",
            f"{run['tokens_per_forward']:.2f}",
            f"{run['forwards_per_second']:.1f}",
            f"{run['step_ms']:.2f}",
            f"{100 * run['roofline_share']:.1f} %",
        ]
        for run in runs
    ]
    phases = list(runs[0]["split_share"]) if runs else []
    split = [
        [run["name"]]
        + [f"{run['split_ms_per_step'][p]:.2f} ({run['split_share'][p]:.0%})" for p in phases]
        + [f"{run['watched_step_ms']:.2f}", f"{run['bytes_per_step'] / 1e6:.1f}"]
        for run in runs
    ]
    head = (what, "requests", "tokens/s", "tokens per forward", "forwards/s", "step ms")
    return [
        table((*head, "share of roofline"), numbers),
        table((what, *(f"{p} ms" for p in phases), "watched step ms", "MB read a step"), split),
    ]


def facts_of(
    llm: "DiffusionLLM", model: str, params: "SamplingParams", work: "dict[str, Work]"
) -> dict[str, str]:
    """Return what the engine runs with and what it is asked, typed or not."""
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
        "dtype": str(engine.kv.keys_LSGD.dtype).removeprefix("torch."),
        "prefix caching": "on" if shared else "off",
        "torch": torch.__version__,
        "block length": str(policy.block_length),
        "decoder": policy.decoder.model_dump_json(),
        "iteration": policy.iteration.model_dump_json(),
        "cache": policy.cache.model_dump_json(),
        "cfg scale": f"{policy.cfg_scale:g}",
    } | {
        f"requests of {name}": f"{len(prompts)}, prompts of {_span(map(len, prompts))} tokens, "
        f"max_tokens {_span(wish.max_tokens for wish in wishes)}"
        for name, (prompts, wishes) in work.items()
    }


def _span(values: Any) -> str:
    found = sorted(values)
    return str(found[0]) if found[0] == found[-1] else f"{found[0]} to {found[-1]}"


@spread
def latency(
    *,
    model: flags.Model = "demo",
    engine: flags.Engine = EACH_ITS_OWN,
    batch_size: own.BatchSize = "8",
    input_len: own.InputLen = 32,
    output_len: own.OutputLen = 128,
    num_iters_warmup: own.Warmup = 10,
    num_iters: own.Iterations = 30,
    steps_per_round: own.StepsPerRound = 1,
    seed: own.Seed = 0,
    sampling: flags.Sampling,
    diffusion: flags.Diffusion,
    result: own.Result,
) -> None:
    """Measure the latency of batches of random prompts with answers of equal length."""
    with one_sentence():
        from diffray.cluster.cli.bench.roofline import memory_bandwidth
        from diffray.cluster.cli.request_options import sampling_params
        from diffray.cluster.control.llm import DiffusionLLM

        facts = when_and_where()
        result.check()
        sizes = own.counts(batch_size, "--batch-size", high=MOST_AT_ONCE)
        typed = flags.typed_request(
            sampling, diffusion, max_tokens=output_len, seed=seed, ignore_eos=True
        )
        params = sampling_params(typed, diffusion.settings or ())
        options = engine.typed() | {"max_num_seqs": max(sizes), "steps_per_round": steps_per_round}
        found: list[dict[str, Any]] = []
        with interruptible(len(sizes)) as progress, DiffusionLLM(model, **options) as llm:
            prompts = random_ids(llm, max(sizes), input_len, seed)
            facts |= {"steps per round": str(steps_per_round)}
            facts |= facts_of(llm, model, params, {"a batch": (prompts, [params])})
            bandwidth = memory_bandwidth(llm.engine.slots.device)
            for size in sizes:
                work = prompts[:size], [params] * size
                for times in (num_iters_warmup, num_iters):
                    if times:
                        run = timed(llm, f"batch {size}", [work[0]] * times, [work[1]] * times)
                mean, shares = fmean(run.latencies), {}
                typer.echo(f"{run.name}\nAvg latency: {mean} seconds")
                for percent in PERCENTS:
                    shares[str(percent)] = percentile(run.latencies, percent)
                    typer.echo(f"{percent}% percentile latency: {shares[str(percent)]} seconds")
                more = {"batch_size": size, "avg_latency": mean, "percentiles": shares}
                found.append(look_at(llm, run, work, bandwidth) | more)
                progress.done += 1
        publish(progress, "latency of batches", facts, found, tables(found, "batch"), result)


@spread
def throughput(
    *,
    model: flags.Model = "demo",
    engine: flags.Engine = EACH_ITS_OWN,
    data: own.Data = SHORT_PROMPTS,
    raw: flags.Raw = False,
    max_num_seqs: own.MaxNumSeqs = 16,
    steps_per_round: own.StepsPerRound = 1,
    seed: own.Seed = 0,
    sampling: flags.Sampling,
    diffusion: flags.Diffusion,
    result: own.Result,
) -> None:
    """Measure the throughput over data sets; --max-num-seqs 1 runs one prompt at a time."""
    with one_sentence():
        from diffray.cluster.cli.bench.roofline import memory_bandwidth
        from diffray.cluster.cli.request_options import sampling_params
        from diffray.cluster.control.llm import DiffusionLLM

        facts = when_and_where()
        result.check()
        sets, ends = read_sets(data), data.ignore_eos or None
        typed = flags.typed_request(
            sampling, diffusion, max_tokens=data.output_len, seed=seed, ignore_eos=ends
        )
        params = sampling_params(typed, diffusion.settings or ())
        sizes = {"max_num_seqs": max_num_seqs, "steps_per_round": steps_per_round}
        options = engine.typed() | sizes
        found: list[dict[str, Any]] = []
        with (
            interruptible(len(sets)) as progress,
            DiffusionLLM(model, **options) as llm,
        ):
            facts |= {name.replace("_", " "): str(value) for name, value in sizes.items()}
            work = tasks(llm, sets, data, seed=seed, raw=raw, params=params)
            progress.planned = len(work)
            facts |= facts_of(llm, model, params, work)
            bandwidth = memory_bandwidth(llm.engine.slots.device)
            for task, (prompts, wishes) in work.items():
                few = prompts[:max_num_seqs], wishes[:max_num_seqs]
                timed(llm, "", [few[0]], [few[1]])
                if max_num_seqs == 1:
                    run = timed(llm, task, [[p] for p in prompts], [[wish] for wish in wishes])
                else:
                    run = timed(llm, task, [prompts], [wishes])
                whole, rate = run.prompt_tokens + run.tokens, run.requests / run.seconds
                typer.echo(
                    f"{task}\nThroughput: {rate:.2f} requests/s, "
                    f"{whole / run.seconds:.2f} total tokens/s, "
                    f"{run.tokens_per_second:.2f} output tokens/s"
                )
                if run.sequence_rate is not None:
                    typer.echo(f"Mean of each sequence's tokens/s: {run.sequence_rate:.2f}")
                more = {"elapsed_time": run.seconds, "num_requests": run.requests}
                more |= {"total_num_tokens": whole, "requests_per_second": rate}
                found.append(look_at(llm, run, few, bandwidth) | more)
                progress.done += 1
        publish(progress, "throughput", facts, found, tables(found, "task"), result)
