"""`diffray doctor`: checks the machine, and on a GPU the kernels for a model."""

import json
from dataclasses import asdict

import typer

from diffray.cluster.cli import flags
from diffray.cluster.control.engine_config import EngineConfig


def doctor(
    model: flags.Checkpoint = "demo",
    *,
    compute: flags.Compute,
    ranks: flags.Ranks,
    as_json: flags.Json = False,
) -> None:
    """Check this machine, and on a GPU the kernels for a model.

    The exit status is 1 if something must be fixed.
    """
    typer.echo("Checking this machine, which takes up to a minute ...", err=True)
    from diffray.cluster.cli.machine_checks import Check, machine_checks
    from diffray.components.mesh import Mesh
    from diffray.workers.bring_up.start import bring_up

    config = EngineConfig(**compute, **ranks)
    checks = []
    for check in machine_checks(model, config):
        checks.append(check)
        if not as_json:
            typer.echo(f"{check.name:<14}{check.found}")
    share = Mesh(0, config.tensor_parallel_size, config.expert_parallel)
    found = bring_up(model, config.rank_options, share, again=True)
    if found.failed:
        fix = f"Triton's kernels cannot be used ({found.failed}); --kernels torch skips them"
        checks.append(Check("kernels", "torch's only", fix))
    fixes = [check.fix for check in checks if check.fix]
    if as_json:
        values = {"checks": [*map(asdict, checks)], **found.model_dump()}
        typer.echo(json.dumps(values, indent=2))
    else:
        ending = [f"To fix: {fix}." for fix in fixes] or ["Nothing to fix."]
        typer.echo("\n".join([*found.lines(), "", *ending]))
    if fixes:
        raise typer.Exit(1)
