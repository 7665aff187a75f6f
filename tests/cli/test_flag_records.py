"""Records of flags: each field is a flag of the command, and the command gets the record."""

import json
from typing import Annotated, Any, Literal, get_args, get_type_hints

import pytest
import typer
from pydantic import Field
from typer.main import get_command
from typer.testing import CliRunner

from diffray.cluster.api.settings import ApiSettings
from diffray.cluster.cli import flags, main, serve_options
from diffray.cluster.cli.flag_records import (
    flag,
    names_of,
    record,
    refuse_flags,
    spread,
    typed,
)
from diffray.cluster.cli.help import Command
from diffray.cluster.control.engine_config import EngineConfig
from diffray.cluster.serve.address import Server
from diffray.cluster.serve.deployment_options import Deployment
from diffray.components.config import Config
from diffray.components.params import SamplingParams
from diffray.components.policy import DiffusionParams


@record("Size")
class Size:
    """Two flags."""

    width: int = flag(1, help="How wide.")
    height: int = flag(2, "--height", "--tall", help="How high.")


@record("Colour")
class Colour:
    """One flag."""

    colour: str = flag("grey")


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


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ("door --width 3 --tall 4 --twice", "door 3x4 blue True"),
        ("--width 1 --colour red", "wall 1x2 red False"),
        ("", "wall 1x2 blue False"),  # the default of a record, and that of the command for it
    ],
)
def test_what_is_typed_arrives_in_the_records(arguments: str, said: str) -> None:
    assert says(*arguments.split()) == said


class Brush(Config):
    """A model with a field of each type that flags are made from."""

    hairs: int = Field(40, ge=1, description="How many hairs.")
    soft: bool = Field(False, description="Whether it is soft.")
    wet: bool | None = Field(None, description="Whether it is wet; default: it depends.")
    shape: Literal["flat", "round"] = Field("flat", description="The shape.")
    owners: tuple[str, ...] = Field((), description="Who may use it.")
    length: int | None = Field(None, description="The length.")


@record("Brush", Brush)
class BrushFlags:
    """All of them, some under other names, one as a text."""

    hairs: int | None = flag(None, "--hairs", "-H")
    soft: bool | None = flag()
    wet: bool | None = flag()
    shape: str | None = flag(None, "--form")
    owners: list[str] | None = flag(None, "--owner")
    length: str | None = flag(metavar="LENGTH")


@spread
def sweep(
    context: typer.Context, *, brush: BrushFlags, dry: Annotated[bool, typer.Option()] = False
) -> None:
    """Use a brush."""
    if dry:
        refuse_flags(context, "with --dry", ("hairs", "wet", "length"))
    typer.echo(json.dumps(typed(brush)))


def sweeps(*arguments: str) -> Any:
    app = typer.Typer()
    app.command(cls=Command)(sweep)
    return CliRunner().invoke(app, list(arguments))


def test_only_what_was_typed_arrives() -> None:
    assert json.loads(sweeps().stdout) == {}
    assert json.loads(sweeps("--hairs", "40", "--no-wet", "--length", "4m").stdout) == {
        "hairs": 40,
        "wet": False,
        "length": "4m",
    }
    typed = sweeps("-H", "9", "--soft", "--form", "round", "--owner", "a", "--owner", "b").stdout
    brush = Brush(**json.loads(typed))
    assert brush == Brush(hairs=9, soft=True, shape="round", owners=("a", "b"))


def test_flags_say_what_their_fields_say() -> None:
    made: Any = get_command(_app(sweep))
    found = {each.name: each for each in made.params}
    for name, field in Brush.model_fields.items():
        assert found[name].default is None
        text, _, default = str(found[name].help).partition("  [default: ")
        assert text.removesuffix("; repeatable.") in str(field.description)
        assert default.removesuffix("]") == str(field.default or "")
    assert found["shape"].metavar == "flat|round"
    assert found["owners"].multiple and "repeatable" in str(found["owners"].help)
    assert found["wet"].secondary_opts == ["--no-wet"]


def test_a_typed_default_is_refused_too_where_it_has_no_effect() -> None:
    assert sweeps("--dry").exit_code == 0
    for words in (["--hairs", "40"], ["--hairs=40"], ["-H", "40"], ["--no-wet"]):
        name, *_ = words[0].split("=")
        assert f"{name} has no effect with --dry; drop it" in sweeps("--dry", *words).stderr


@pytest.mark.parametrize(
    ("group", "model"),
    [
        (flags.Engine, EngineConfig),
        (serve_options.Layout, EngineConfig),
        (serve_options.Routing, Deployment),
        (serve_options.Listening, Server),
        (serve_options.Api, ApiSettings),
    ],
)
def test_what_flags_are_read_as_fits_their_models(group: Any, model: type[Config]) -> None:
    """Their types are declared twice: a value of each flag is one that its model takes."""
    values: dict[Any, Any] = {
        int: 8,
        bool: False,
        float: 1.5,
        str: "4GiB",
        list[int]: [8],
        list[str]: ["x"],
    }
    fits: dict[str, Any] = {"dtype": "float32", "kernels": "torch", "quantization": "experts_int8"}
    fits |= {"lora_modules": ["name=path"], "first_step_caching": "step0"}
    fits |= {"scheduling_policy": "fcfs", "kv_cache_dtype": "int8"}
    hints = get_type_hints(group)
    found = options_of("serve")
    for name in names_of(group):
        (kind, _) = get_args(hints[name])
        value = fits.get(name, values[kind])
        others = {"tensor_parallel_size": 2} if name == "expert_parallel" else {}
        assert name in model(**{name: value}, **others).model_fields_set
        assert found[name].rich_help_panel


def test_flags_of_a_request_agree_with_its_parameters() -> None:
    """Their models import torch, which help must not; so the two are compared."""
    found, fields = (
        options_of("generate"),
        SamplingParams.model_fields | DiffusionParams.model_fields,
    )
    common = {*found} & {*fields} - {"decoder", "cache", "iteration"}
    assert common == {"max_tokens", "temperature", "top_p", "top_k", "seed", "stop", "block_length"}
    for name in common:
        assert found[name].help.removesuffix("; repeatable.") in str(fields[name].description)
        assert found[name].default is None


def options_of(command: str) -> dict[str, Any]:
    group: Any = get_command(main.app)
    return {each.name: each for each in group.commands[command].load().params}


def _app(command: Any) -> typer.Typer:
    app = typer.Typer()
    app.command()(command)
    return app
