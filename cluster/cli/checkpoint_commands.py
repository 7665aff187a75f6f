"""`diffray info`, `diffray convert` and `diffray quantize`: the commands for checkpoints."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from diffray.cluster.cli import flags

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
    if name in ("diffusion", "policies"):
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
