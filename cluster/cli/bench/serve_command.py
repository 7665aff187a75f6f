"""`diffray bench serve`: load on any OpenAI-compatible server, with vLLM's flags."""

from typing import Annotated, Any

import typer

from diffray.cluster.cli import flags
from diffray.cluster.cli.bench import flags as common
from diffray.cluster.cli.bench import serve_flags as own
from diffray.cluster.cli.failures import one_sentence
from diffray.cluster.cli.flag_records import spread
from diffray.cluster.cli.help import Command

_SEVERAL = ("--goodput", "--metadata", "--header")


class ManyValues(Command):
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


@spread
def serve(
    *,
    server: own.Server,
    data: common.Data,
    seed: common.Seed = 0,
    traffic: own.Traffic,
    sampling: flags.Sampling,
    wishes: own.Wishes,
    diffusion: flags.Diffusion,
    telling: own.Telling,
    keeping: own.Keeping,
    disable_tqdm: Annotated[
        bool,
        typer.Option("--disable-tqdm", help="Hide the progress bar.", rich_help_panel="Result"),
    ] = False,
    report: common.Report = None,
) -> None:
    """Send requests to a server at a given rate and measure latency and throughput."""
    with one_sentence():
        from diffray.cluster.cli.bench.interrupt import Interruptible
        from diffray.cluster.cli.bench.machine import when_and_where
        from diffray.cluster.cli.bench.places import check_place
        from diffray.cluster.cli.bench.plan import Plan, body, choose_backend
        from diffray.cluster.cli.bench.result_file import Saving
        from diffray.cluster.cli.bench.serving import TaskRun, check_success, run_plan

        facts = when_and_where()
        check_place(report, "--report")
        backend = choose_backend(server, data)
        plan = Plan.of(
            server,
            data,
            traffic,
            telling,
            backend=backend,
            seed=seed,
            common=body(backend, data, sampling, wishes, diffusion, server.model),
            progress=not disable_tqdm,
        )
        saving = Saving.of(keeping, backend)
        found: list[TaskRun] = []
        with Interruptible() as work:
            run_plan(plan, saving, typer.echo, found)
        whole = sum(not run.served.load.interrupted for run in found)
        if report is not None and found:
            from diffray.cluster.cli.bench.report import serving_report

            facts |= work.facts(whole, plan.runs)
            report.write_text(serving_report(facts, plan.facts(), found))
        work.end(whole, plan.runs, part=whole < len(found))
        check_success(found)
