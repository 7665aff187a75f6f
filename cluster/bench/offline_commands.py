"""`diffray bench latency` and `diffray bench throughput`: an engine in this process, no server."""

import json
from pathlib import Path

import typer

from diffray.cluster import flags
from diffray.cluster.bench import flags as own
from diffray.cluster.failures import one_sentence

MOST_AT_ONCE = 64


def latency(
    model: flags.Model = "demo",
    dtype: flags.Dtype = "auto",
    device: flags.Device = "auto",
    kernels: flags.Kernels = "auto",
    cuda_graphs: flags.CudaGraphs = None,
    mask_token_id: flags.MaskTokenId = None,
    eos_token_id: flags.EosTokenId = None,
    batch_size: own.BatchSize = "8",
    input_len: own.InputLen = 32,
    output_len: own.OutputLen = 128,
    num_iters_warmup: own.Warmup = 10,
    num_iters: own.Iterations = 30,
    steps_per_round: own.StepsPerRound = 1,
    seed: own.Seed = 0,
    temperature: flags.Temperature = None,
    top_p: flags.TopP = None,
    top_k: flags.TopK = None,
    block_length: flags.BlockLength = None,
    decoder: flags.Decoder = None,
    cache: flags.Cache = None,
    iteration: flags.Iteration = None,
    settings: flags.Settings = None,
    output_json: own.OutputJson = None,
    report: own.Report = None,
) -> None:
    """Time batches of random prompts whose answers all have the same length."""
    typed = {
        "max_tokens": output_len,
        "temperature": temperature,
        "top_p": top_p,
        "top_k": top_k,
        "seed": seed,
        "ignore_eos": True,
        "block_length": block_length,
        "decoder.kind": decoder,
        "cache.kind": cache,
        "iteration.kind": iteration,
    }
    with one_sentence():
        from diffray.cluster.bench.machine import engine_facts, when_and_where
        from diffray.cluster.bench.offline import look_at, timed
        from diffray.cluster.bench.output import PERCENTS, latency_lines, print_found
        from diffray.cluster.bench.percentiles import Spread, as_word, counts
        from diffray.cluster.bench.roofline import memory_bandwidth
        from diffray.cluster.bench.workload import random_ids
        from diffray.cluster.options import sampling_params
        from diffray.workers.llm import DiffusionLLM

        facts = when_and_where()
        sizes = counts(batch_size, "--batch-size", high=MOST_AT_ONCE)
        params = sampling_params(typed, settings or ())
        with DiffusionLLM(
            model,
            dtype=dtype,
            device=device,
            kernels=kernels,
            cuda_graphs=cuda_graphs,
            mask_token_id=mask_token_id,
            eos_token_id=eos_token_id,
            max_num_seqs=max(sizes),
            steps_per_round=steps_per_round,
        ) as llm:
            facts |= engine_facts(llm, model) | {"steps per round": str(steps_per_round)}
            prompts = random_ids(llm, max(sizes), input_len, seed)
            bandwidth = memory_bandwidth(llm.engine.slots.device)
            found = []
            for size in sizes:
                batch, wishes = prompts[:size], [params] * size
                timed(llm, "", [batch] * num_iters_warmup, [wishes] * num_iters_warmup)
                run = timed(llm, f"batch {size}", [batch] * num_iters, [wishes] * num_iters)
                found.append(look_at(llm, run, batch, wishes, bandwidth))
                typer.echo("\n".join([f"batch {size}", *latency_lines(run.latencies)]))
        print_found(found, "batch")
        runs = [
            looked.as_json()
            | {"batch_size": size, "avg_latency": spread.mean}
            | {"percentiles": {as_word(p): value for p, value in spread.percentiles}}
            for size, looked in zip(sizes, found, strict=True)
            for spread in [Spread.of(looked.run.latencies, PERCENTS)]
        ]
        _write(output_json, facts, runs)
        if report is not None:
            from diffray.cluster.bench.report import latency_report

            report.write_text(latency_report(facts, sizes, found))


def throughput(
    model: flags.Model = "demo",
    dtype: flags.Dtype = "auto",
    device: flags.Device = "auto",
    kernels: flags.Kernels = "auto",
    cuda_graphs: flags.CudaGraphs = None,
    mask_token_id: flags.MaskTokenId = None,
    eos_token_id: flags.EosTokenId = None,
    dataset_name: own.DatasetName = "random",
    dataset_path: own.DatasetPath = None,
    num_prompts: own.NumPrompts = 1000,
    input_len: own.InputLen = 128,
    output_len: own.MaybeOutputLen = None,
    ignore_eos: own.IgnoreEos = False,
    raw: flags.Raw = False,
    max_num_seqs: own.MaxNumSeqs = 16,
    steps_per_round: own.StepsPerRound = 1,
    seed: own.Seed = 0,
    temperature: flags.Temperature = None,
    top_p: flags.TopP = None,
    top_k: flags.TopK = None,
    block_length: flags.BlockLength = None,
    decoder: flags.Decoder = None,
    cache: flags.Cache = None,
    iteration: flags.Iteration = None,
    settings: flags.Settings = None,
    output_json: own.OutputJson = None,
    report: own.Report = None,
) -> None:
    """Time data sets, one task after the other; with --max-num-seqs 1 prompt by prompt."""
    typed = {
        "max_tokens": output_len,
        "temperature": temperature,
        "top_p": top_p,
        "top_k": top_k,
        "seed": seed,
        "ignore_eos": ignore_eos or None,
        "block_length": block_length,
        "decoder.kind": decoder,
        "cache.kind": cache,
        "iteration.kind": iteration,
    }
    with one_sentence():
        from diffray.cluster.bench.machine import engine_facts, when_and_where
        from diffray.cluster.bench.offline import look_at, timed
        from diffray.cluster.bench.output import print_found, throughput_line
        from diffray.cluster.bench.roofline import memory_bandwidth
        from diffray.cluster.bench.workload import tasks
        from diffray.cluster.options import sampling_params
        from diffray.workers.llm import DiffusionLLM

        facts = when_and_where()
        params = sampling_params(typed, settings or ())
        with DiffusionLLM(
            model,
            dtype=dtype,
            device=device,
            kernels=kernels,
            cuda_graphs=cuda_graphs,
            mask_token_id=mask_token_id,
            eos_token_id=eos_token_id,
            max_num_seqs=max_num_seqs,
            steps_per_round=steps_per_round,
        ) as llm:
            facts |= engine_facts(llm, model) | {
                "steps per round": str(steps_per_round),
                "sequences at once": str(max_num_seqs),
            }
            work = tasks(
                llm,
                dataset_name,
                path=dataset_path,
                count=num_prompts,
                input_len=input_len,
                seed=seed,
                raw=raw,
                params=params,
            )
            bandwidth = memory_bandwidth(llm.engine.slots.device)
            found = []
            for task, (prompts, wishes) in work.items():
                few = min(len(prompts), max_num_seqs)
                timed(llm, "", [prompts[:few]], [wishes[:few]])
                one_by_one = max_num_seqs == 1
                run = timed(
                    llm,
                    task,
                    [[prompt] for prompt in prompts] if one_by_one else [prompts],
                    [[wish] for wish in wishes] if one_by_one else [wishes],
                )
                found.append(look_at(llm, run, prompts[:few], wishes[:few], bandwidth))
                typer.echo(f"{task}\n{throughput_line(found[-1])}")
                if run.sequence_rate is not None:
                    typer.echo(f"Mean of each sequence's tokens/s: {run.sequence_rate:.2f}")
        print_found(found, "task")
        runs = [
            looked.as_json()
            | {
                "elapsed_time": looked.run.seconds,
                "num_requests": looked.run.requests,
                "total_num_tokens": looked.run.prompt_tokens + looked.run.tokens,
                "requests_per_second": looked.run.requests / looked.run.seconds,
            }
            for looked in found
        ]
        _write(output_json, facts, runs)
        if report is not None:
            from diffray.cluster.bench.report import throughput_report

            report.write_text(throughput_report(facts, found))


def _write(path: Path | None, facts: dict[str, str], runs: list[dict[str, object]]) -> None:
    if path is not None:
        path.write_text(json.dumps({"facts": facts, "runs": runs}, indent=1) + "\n")
