"""What `diffray bench latency` and `diffray bench throughput` do once the engine is there."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import typer

from diffray.cluster.cli.bench.offline import Looked, look_at, timed
from diffray.cluster.cli.bench.output import PERCENTS, latency_lines, throughput_line
from diffray.cluster.cli.bench.percentiles import Spread, as_word
from diffray.cluster.cli.bench.roofline import memory_bandwidth
from diffray.cluster.control.llm import DiffusionLLM
from diffray.components.params import SamplingParams

Work = tuple[list[list[int]], list[SamplingParams]]


def run_batches(
    llm: DiffusionLLM,
    sizes: Sequence[int],
    work: Work,
    found: list[Looked],
    *,
    warmups: int,
    times: int,
) -> None:
    """Time the first prompts in batches of these sizes, and tell of each once it has ended."""
    bandwidth = memory_bandwidth(llm.engine.slots.device)
    prompts, params = work
    for size in sizes:
        batch, wishes = prompts[:size], params[:size]
        if warmups:
            timed(llm, "", [batch] * warmups, [wishes] * warmups)
        run = timed(llm, f"batch {size}", [batch] * times, [wishes] * times)
        found.append(look_at(llm, run, batch, wishes, bandwidth))
        typer.echo("\n".join([f"batch {size}", *latency_lines(run.latencies)]))


def run_tasks(
    llm: DiffusionLLM, tasks: dict[str, Work], found: list[Looked], *, at_once: int
) -> None:
    """Time task after task, with prompts together or, where `at_once` is 1, one by one."""
    bandwidth = memory_bandwidth(llm.engine.slots.device)
    for task, (prompts, wishes) in tasks.items():
        few = min(len(prompts), at_once)
        timed(llm, "", [prompts[:few]], [wishes[:few]])
        if at_once == 1:
            run = timed(llm, task, [[prompt] for prompt in prompts], [[wish] for wish in wishes])
        else:
            run = timed(llm, task, [prompts], [wishes])
        found.append(look_at(llm, run, prompts[:few], wishes[:few], bandwidth))
        typer.echo(f"{task}\n{throughput_line(found[-1])}")
        if run.sequence_rate is not None:
            typer.echo(f"Mean of each sequence's tokens/s: {run.sequence_rate:.2f}")


def batches_as_json(sizes: Sequence[int], found: Sequence[Looked]) -> list[dict[str, Any]]:
    return [
        looked.as_json()
        | {"batch_size": size, "avg_latency": spread.mean}
        | {"percentiles": {as_word(p): value for p, value in spread.percentiles}}
        for size, looked in zip(sizes[: len(found)], found, strict=True)
        for spread in [Spread.of(looked.run.latencies, PERCENTS)]
    ]


def tasks_as_json(found: Sequence[Looked]) -> list[dict[str, Any]]:
    return [
        looked.as_json()
        | {
            "elapsed_time": looked.run.seconds,
            "num_requests": looked.run.requests,
            "total_num_tokens": looked.run.prompt_tokens + looked.run.tokens,
            "requests_per_second": looked.run.requests / looked.run.seconds,
        }
        for looked in found
    ]


def write_json(path: Path | None, facts: dict[str, str], runs: list[dict[str, Any]]) -> None:
    """Write the numbers, if a file was named."""
    if path is not None:
        path.write_text(json.dumps({"facts": facts, "runs": runs}, indent=1) + "\n")
