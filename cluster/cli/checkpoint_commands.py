"""`diffray info`, `diffray convert` and `diffray quantize`: the commands for checkpoints."""

import json
from pathlib import Path
from typing import Annotated

import typer

from diffray.cluster.cli import flags


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
    from diffray.cluster.cli.facts import as_lines, as_values
    from diffray.components.checkpoints.info import describe

    found = describe(model)
    typer.echo(json.dumps(as_values(found), indent=2) if as_json else as_lines(found))
