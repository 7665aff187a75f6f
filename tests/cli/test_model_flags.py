"""Fields of a model as flags: what help says of them, and what a command gets."""

from pathlib import Path
from typing import Annotated, Any, Literal

import pytest
import typer
from pydantic import Field
from typer.testing import CliRunner

from diffray.cluster.cli.commands import Fields, Given, with_flags
from diffray.components.config import Config


class Oven(Config):
    """A model with a field of each type that flags have."""

    heat: int = Field(180, ge=50, description="Degrees.")
    grill: bool = Field(True, description="Heat from above.")
    mode: Literal["fan", "still"] = Field("fan", description="The air.")
    minutes: float | None = Field(9.0, description="How long.")
    trays: tuple[int, ...] = Field((), description="Which trays.")
    names: dict[str, str] = Field({}, description="The dishes.")
    recipe: str | dict[str, str] | None = Field(None, description="What to do.")
    weight: int | None = Field(None, description="Of the dish.")
    book: Path | None = Field(None, description="A file.")
    hidden: int = Field(0, description="No flag.")


ALL = Fields(
    Oven, "Oven", *("grill", "mode", "trays", "names", "recipe", "book"),
    minutes=typer.Option(show_default=False),
    heat=typer.Option("--heat", "--degrees"), weight=typer.Option(metavar="SIZE", parser=str),
)  # fmt: skip


got: list[Any] = []
app = typer.Typer(rich_markup_mode=None)


def bake(*, oven: Annotated[Given, ALL], quiet: bool = False) -> None:
    got.append((oven, quiet))


app.command()(with_flags(bake))


def test_help_says_what_the_model_does() -> None:
    said = " ".join(CliRunner().invoke(app, ["--help"]).stdout.split())
    for part in (
        "--heat, --degrees <int> Degrees. [default: 180]",
        "--grill / --no-grill Heat from above. [default: on]",
        "--mode fan|still The air. [default: fan]",
        "--minutes <float> How long. --trays <list[int]> Which trays; repeatable.",
        "--names <list[str]> The dishes; repeatable. --recipe <str> What to do.",
        "--weight SIZE Of the dish. --book <path> A file.",
    ):
        assert part in said, said
    assert "--hidden" not in said


@pytest.mark.parametrize(
    ("typed", "given"),
    [
        ("", {}),
        ("--degrees 200 --no-grill", {"heat": 200, "grill": False}),
        ("--heat 1 --mode STILL", {"heat": 1, "mode": "STILL"}),  # the model refuses them
        ("--trays 1 --trays 2 --minutes 0", {"trays": [1, 2], "minutes": 0.0}),
        (
            "--names a=b --recipe c=d --weight 4kg",
            {"names": ["a=b"], "recipe": "c=d", "weight": "4kg"},
        ),
        ("--book a.txt", {"book": Path("a.txt")}),
    ],
)
def test_a_command_gets_only_what_was_typed(typed: str, given: dict[str, Any]) -> None:
    got.clear()
    CliRunner().invoke(app, typed.split())
    assert got == [(given, False)]


def test_a_name_that_is_no_field_is_an_error() -> None:
    with pytest.raises(ValueError, match="heet"):
        Fields(Oven, "Oven", "heet")
