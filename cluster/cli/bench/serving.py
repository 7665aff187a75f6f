"""A benchmark of a server: the runs of a sweep, one after the other."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from itertools import product
from math import inf
from typing import Any

import httpx2
from rich.table import Table

from diffray.cluster.cli.bench.load import Load, Target, run_load, wait_until_ready
from diffray.cluster.cli.bench.output import console
from diffray.cluster.cli.bench.percentiles import span
from diffray.cluster.cli.bench.plan import Plan
from diffray.cluster.cli.bench.prompts import RANDOM, Ask
from diffray.cluster.cli.bench.requests import (
    LocalTokens,
    ServerTokens,
    Tokens,
    Wish,
    each,
    wishes,
)
from diffray.cluster.cli.bench.result_file import Saving
from diffray.cluster.cli.bench.serving_result import Served, printed
from diffray.cluster.cli.bench.streamed import Reply
from diffray.cluster.cli.endpoint import json_of

TIMEOUT_SECONDS = 6 * 3600.0
SWEEP = (
    "data", "concurrency", "RPS", "requests", "req/s", "tokens/s", "TTFT ms", "E2EL ms",
    "P99 E2EL ms", "tokens per step",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class TaskRun:
    """One run of the sweep: a data set at one rate and concurrency, and what was asked."""

    task: str
    served: Served
    model: str
    max_tokens: str

    @property
    def asked(self) -> str:
        """What a report says of the requests; prompts' tokens are known of those that succeeded."""
        replies = self.served.load.replies
        read = [reply.prompt_tokens or 0 for reply in replies if reply.success]
        prompts = f", prompts of {span(read)} tokens" if read else ""
        return f"{len(replies)}{prompts}, max_tokens {self.max_tokens}"

    @property
    def failures(self) -> str | None:
        """How many requests failed and why the first did, if any did."""
        reasons = [reply.error for reply in self.served.load.replies if not reply.success]
        if not reasons:
            return None
        return f"{len(reasons)} of {len(self.served.load.replies)} failed, the first: {reasons[0]}"


def check_success(found: list[TaskRun]) -> None:
    """Refuse to call a benchmark done in which no request succeeded."""
    replies = [reply for run in found for reply in run.served.load.replies]
    if replies and not any(reply.success for reply in replies):
        raise ValueError(f"no request succeeded; the first failed so: {replies[0].error}")


def run_plan(
    plan: Plan, saving: Saving, say: Callable[[str], object], found: list[TaskRun]
) -> None:
    """Run the whole sweep, print each run's block and a table of all, and save what is wanted.

    A run is in `found` once it has ended, also where something stops the next one. Of one that
    Ctrl-C ends, the requests are counted that were answered by then.
    """
    saving.check(plan.runs)
    try:
        asyncio.run(_run(plan, saving, say, found))
    finally:
        if plan.runs > 1 and found:
            console().print(sweep_table(found))


async def _run(
    plan: Plan, saving: Saving, say: Callable[[str], object], found: list[TaskRun]
) -> None:
    async with httpx2.AsyncClient(**plan.server.options(TIMEOUT_SECONDS)) as client:
        target = Target(client, plan.path, plan.headers, plan.id_prefix)
        model = plan.model or await _first_model(client, plan)
        tokens: Tokens = ServerTokens(client, model)
        if plan.tokenizer:
            tokens = LocalTokens(plan.tokenizer)
        for name, asks in plan.datasets:
            common = ({"ignore_eos": True} if name == RANDOM else {}) | plan.common
            first, *_ = await _wishes(plan, name, asks[:1], tokens, run=-1, count=1)
            warm = first.body(plan.backend, model, common)
            if plan.ready_timeout:
                await wait_until_ready(target, warm, plan.ready_timeout)
            await each(lambda body: target.send(body, 0, 0.0), [warm] * plan.warmups)
            for number, (rate, concurrency) in enumerate(product(plan.rates, plan.concurrencies)):
                asked = await _wishes(plan, name, asks, tokens, run=number, count=plan.count)
                bodies = [wish.body(plan.backend, model, common) for wish in asked]
                load = await _measured(plan, target, bodies, rate, concurrency)
                answered = [asked[at] for at in load.numbers]
                if not answered:
                    raise asyncio.CancelledError
                await _count_missing(load, answered, tokens)
                longest = str(common.get("max_tokens", span(wish.max_tokens for wish in asked)))
                run = TaskRun(name, Served.of(load, plan.wanted), model, longest)
                found.append(run)
                say("\n".join(printed(run.served)))
                _tell_failures(load.replies, say)
                said = {
                    "backend": plan.backend,
                    "model_id": model,
                    "tokenizer_id": plan.tokenizer,
                    "num_prompts": len(answered),
                    "burstiness": plan.burstiness,
                    "dataset_name": name,
                    "tasks": [wish.task for wish in answered],
                }
                if load.interrupted:
                    said["interrupted"] = True
                if path := saving.write(run.served, said, name):
                    say(f"written to {path}")
                if load.interrupted:
                    raise asyncio.CancelledError


async def _wishes(
    plan: Plan, name: str, asks: list[Ask], tokens: Tokens, *, run: int, count: int
) -> list[Wish]:
    return await wishes(
        name,
        asks,
        tokens,
        backend=plan.backend,
        count=count,
        input_len=plan.input_len,
        prefix_len=plan.prefix_len,
        output_len=plan.output_len,
        seed=plan.seed,
        run=run,
    )


async def _measured(
    plan: Plan,
    target: Target,
    bodies: list[dict[str, Any]],
    rate: float,
    concurrency: int | None,
) -> Load:
    from tqdm.auto import tqdm

    with tqdm(total=len(bodies), unit="req", delay=2, disable=not plan.progress) as progress:
        return await run_load(
            target,
            bodies,
            plan.offsets(len(bodies), rate),
            rate=rate,
            concurrency=concurrency,
            tick=progress.update,
        )


async def _count_missing(load: Load, asked: list[Wish], tokens: Tokens) -> None:
    """Count the tokens of replies whose server told no usage."""

    async def count(pair: tuple[Reply, Wish]) -> None:
        reply, wish = pair
        if reply.output_tokens is None:
            reply.output_tokens = len(await tokens.encode(reply.text)) if reply.text else 0
        if reply.prompt_tokens is None:
            given = wish.prompt
            reply.prompt_tokens = len(
                await tokens.encode(given) if isinstance(given, str) else given
            )

    await each(count, [(r, w) for r, w in zip(load.replies, asked, strict=True) if r.success])


async def _first_model(client: httpx2.AsyncClient, plan: Plan) -> str:
    try:
        response = await client.get("/v1/models", headers=plan.headers)
    except httpx2.HTTPError:
        raise plan.server.unreachable() from None
    found = json_of(response)
    models = found.get("data") if isinstance(found, dict) else None
    if response.status_code != 200 or not models:
        raise ValueError(f"{plan.server.url}/v1/models tells no model; give --model NAME")
    return str(models[0]["id"])


def _tell_failures(replies: list[Reply], say: Callable[[str], object]) -> None:
    reasons = [reply.error for reply in replies if not reply.success]
    for reason in dict.fromkeys(reasons[:10]):
        say(f"failed: {reasons.count(reason)} x {reason}")


def sweep_table(found: list[TaskRun]) -> Table:
    """Return one row for each run."""
    table = Table(*SWEEP)
    for run in found:
        table.add_row(*sweep_cells(run))
    return table


def sweep_cells(run: TaskRun) -> list[str]:
    load, result, spreads = run.served.load, run.served.result, run.served.spreads
    latencies = spreads["ttft"].median, spreads["e2el"].median, run.served.p99_latency
    return [
        run.task,
        "-" if load.concurrency is None else str(load.concurrency),
        "all at once" if load.rate == inf else f"{load.rate:g}",
        f"{result['completed']}" + (f" ({result['failed']} failed)" if result["failed"] else ""),
        f"{result['request_throughput']:.2f}",
        f"{result['output_throughput']:.1f}",
        *(f"{value:.1f}" if result["completed"] else "-" for value in latencies),
        "-" if load.diffusion is None else f"{load.diffusion.committed_per_step:.2f}",
    ]
