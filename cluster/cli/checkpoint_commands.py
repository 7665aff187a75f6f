"""`diffray info`, `convert` and `quantize` for checkpoints, and `doctor` for the machine."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from diffray.cluster.cli import flags
from diffray.cluster.control.engine_config import EngineConfig

if TYPE_CHECKING:
    from diffray.components.checkpoints.info import Info


def convert(
    source: flags.Checkpoint,
    target: Annotated[Path, typer.Argument(help="The folder to create.")],
) -> None:
    """Rewrite a mixture-of-experts checkpoint to load faster."""
    from diffray.components.checkpoints import convert as fused

    typer.echo(str(fused.convert(source, target)))


def quantize(
    source: flags.Checkpoint,
    target: Annotated[Path, typer.Argument(help="The folder to create.")],
    quantization: Annotated[
        str,
        typer.Option(
            "--quantization",
            "-q",
            help="One format for all linear layers but the head, such as int8 or int4_g128, or "
            "parts with formats: experts=fp8,attention=int8.",
        ),
    ] = "int8",
) -> None:
    """Write a copy of a checkpoint with weights in fewer bits.

    The layout is that of compressed-tensors, which other programs read too.
    """
    from diffray.components.checkpoints.quantize import quantize_checkpoint

    typer.echo(str(quantize_checkpoint(source, target, quantization)))


def info(model: flags.Checkpoint, as_json: flags.Json = False) -> None:
    """Show a checkpoint's size, memory and possible rank counts."""
    from diffray.components.checkpoints.info import describe

    found = describe(model)
    typer.echo(json.dumps(as_values(found), indent=2) if as_json else as_lines(found))


def as_values(found: "Info") -> dict[str, Any]:
    """Return the facts in JSON's types."""
    return asdict(found) | {"path": str(found.path)}


def as_lines(found: "Info") -> str:
    """Return the facts in two columns; long values are not wrapped."""
    facts = {name: value for name, value in as_values(found).items() if value not in ({}, (), None)}
    width = max(map(len, facts))
    return "\n".join(
        f"{name.replace('_', ' '):<{width}}  {_text(name, value)}" for name, value in facts.items()
    )


def _text(name: str, value: object) -> str:
    if name in ("accepts", "diffusion", "policies"):
        return json.dumps(value)
    if isinstance(value, dict):
        return ", ".join(f"{_text(name, part)} in {key}" for key, part in value.items())
    if isinstance(value, tuple | list):
        return ", ".join(map(str, value))
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int) and "bytes" in name:
        return in_units(value)
    return f"{value:,}" if name.startswith("parameters") else str(value)


def in_units(num_bytes: int) -> str:
    units = ("B", "KiB", "MiB", "GiB", "TiB")
    power = min((max(num_bytes, 1).bit_length() - 1) // 10, len(units) - 1)
    return f"{num_bytes / 1024**power:.4g} {units[power]}"


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
