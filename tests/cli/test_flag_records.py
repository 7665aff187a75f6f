"""Records of flags: each field is a flag of the command, and the command gets the record."""

from dataclasses import dataclass
from inspect import Parameter, signature
from typing import Annotated

import typer
from typer.testing import CliRunner

from diffray.cluster.cli.flag_records import spread


@dataclass(frozen=True, slots=True)
class Size:
    """Two flags, one without a default."""

    width: Annotated[int, typer.Option(help="How wide.")]
    height: Annotated[int, typer.Option("--height", "--tall", help="How high.")] = 2


@dataclass(frozen=True, slots=True)
class Colour:
    """One flag."""

    colour: Annotated[str, typer.Option()] = "grey"


BLUE = Colour("blue")


@spread
def paint(
    where: Annotated[str, typer.Argument()] = "wall",
    *,
    size: Size,
    twice: bool = False,
    colour: Colour = BLUE,
) -> None:
    """Paint something."""
    typer.echo(f"{where} {size.width}x{size.height} {colour.colour} {twice}")


def says(*arguments: str) -> str:
    app = typer.Typer()
    app.command()(paint)
    result = CliRunner().invoke(app, list(arguments))
    return (result.output if result.exit_code else result.stdout).strip()


def test_fields_stand_where_their_record_stood() -> None:
    assert list(signature(paint).parameters) == ["where", "width", "height", "twice", "colour"]


def test_what_is_typed_arrives_in_the_records() -> None:
    assert says("door", "--width", "3", "--tall", "4", "--twice") == "door 3x4 blue True"


def test_defaults_are_the_records_or_those_of_the_commands_own_record() -> None:
    parameters = signature(paint).parameters
    assert parameters["width"].default is Parameter.empty
    assert says("--width", "1", "--colour", "red") == "wall 1x2 red False"
    assert says("--width", "1") == "wall 1x2 blue False"


def test_a_flag_without_a_default_is_needed() -> None:
    assert "--width" in says("door")


def test_help_says_what_the_fields_say() -> None:
    said = says("--help")
    for text in ("Paint something.", "How wide.", "How high."):
        assert text in said
