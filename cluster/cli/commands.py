"""What Typer lacks: commands imported when used, flags that are fields of configuration models,
headings in plain help, and errors in one line with advice.

A parameter `Annotated[Given, Fields(Model, ...)]` of a command becomes one flag per field; the
command gets the values that were typed, by the names of the fields. Help is plain text because
Typer's tables cut long flags in a terminal of 80 columns.
"""

import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from copy import copy
from functools import wraps
from importlib import import_module
from inspect import Parameter, signature
from pathlib import Path
from types import UnionType
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal, Union, get_args, get_origin

import typer
from typer import Option
from typer.core import TyperCommand, TyperGroup
from typer.main import get_command

if TYPE_CHECKING:  # help of all commands is quicker without pydantic
    from pydantic import BaseModel
    from pydantic.fields import FieldInfo

_WORDS: Final = "diffray.words"  # key in a command's context: the flags as they were typed
_USAGE_ERROR: Any = typer.BadParameter.__base__  # Typer does not export it

# Flags of vLLM and SGLang that are missing here, by what to use instead.
_INSTEAD: Final = {
    "--kv-cache-memory SIZE sets the memory of the K/V cache, such as 20GiB": (
        "--gpu-memory-utilization --mem-fraction-static --kv-cache-memory-bytes"
    ),
    "--replicas N runs several copies of the model": "--data-parallel-size --dp-size --dp",
    "--tensor-parallel-size N splits a model over GPUs": "--pipeline-parallel-size",
    "--no-cuda-graphs does the same": "--enforce-eager --disable-cuda-graph",
    "--no-enable-prefix-caching does the same": "--disable-radix-cache",
    "leave it out: no code of a checkpoint is run": "--trust-remote-code",
    "leave it out: every model calls tools if a request lists any": (
        "--enable-auto-tool-choice --tool-call-parser"
    ),
    "leave it out: requests are not logged": (
        "--disable-log-requests --no-enable-log-requests --uvicorn-log-level"
    ),
    "MODEL may be a folder, and HF_HOME says where downloads go": "--download-dir --revision",
    "each request sets its own seed; greedy answers, the default, need none": "--seed",
}


class Group(TyperGroup):
    """Commands under their headings; one that is used is imported, by its callback."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        name, found, rest = super().resolve_command(ctx, args)
        is_later = found is not None and not isinstance(found, TyperGroup)
        return name, found.callback() if is_later else found, rest  # type: ignore[union-attr,misc]

    def format_options(self, ctx: Any, formatter: Any) -> None:
        commands: Any = self.commands
        width = max(map(len, commands))
        listed = [
            (each.rich_help_panel or "Commands", name.ljust(width), each.help)
            for name, each in commands.items()
        ]
        _write(formatter, listed)
        _write(formatter, _described(self, ctx))


class Command(TyperCommand):
    """A command with its flags under headings."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        ctx.meta[_WORDS] = {word.partition("=")[0] for word in args}
        try:
            return super().parse_args(ctx, args)
        except _USAGE_ERROR as error:
            flags = {name for each in self.params for name in (*each.opts, *each.secondary_opts)}
            if said := _instead_of(getattr(error, "option_name", ""), flags):
                error.message, error.possibilities = f"{error.message}; {said}", None
            elif "extra argument" in error.message and "--model" in flags:
                error.message += "; the model goes after --model, a text of several words in quotes"
            raise

    def format_options(self, ctx: Any, formatter: Any) -> None:
        _write(formatter, _described(self, ctx))


def group(text: str, *shown: str) -> typer.Typer:
    """Return a group of commands, with examples at the end of its help."""
    return typer.Typer(
        cls=Group,
        help=text,
        epilog=_examples(shown),
        context_settings={"help_option_names": ["-h", "--help"]},
        no_args_is_help=True,
        rich_markup_mode=None,
        pretty_exceptions_enable=False,
    )


def add(
    to: typer.Typer, panel: str | None, function: str, text: str, *shown: str, name: str = ""
) -> None:
    """Add a command, as MODULE.NAME within this folder, with its line in help and examples."""
    module, _, attribute = function.rpartition(".")
    name = name or attribute

    def load() -> Any:
        alone = typer.Typer(add_completion=False, rich_markup_mode=None)
        command = getattr(import_module(f"diffray.cluster.cli.{module}"), attribute)
        alone.command(name, cls=Command, epilog=_examples(shown))(with_flags(command))
        return get_command(alone)

    to.command(name, help=text, rich_help_panel=panel)(load)


def typed_names(context: typer.Context) -> dict[str, str]:
    """Return the flag of each parameter as it was typed, or else its first name."""
    found = {}
    for parameter in context.command.params:
        names = [*parameter.opts, *parameter.secondary_opts]
        typed = next((name for name in names if name in context.meta[_WORDS]), names[0])
        is_flag = parameter.param_type_name == "option"
        found[str(parameter.name)] = typed if is_flag else "MODEL"
    return found


def refuse(context: typer.Context, when: str, names: Iterable[str]) -> None:
    """Refuse named parameters that were typed, because they would have no effect."""
    for name, flag in typed_names(context).items():
        source = context.get_parameter_source(name)
        if name in names and source is not None and source.name == "COMMANDLINE":
            raise ValueError(f"{flag} has no effect {when}; drop it")


def _instead_of(name: str, flags: set[str]) -> str | None:
    """Return what to use instead of an unknown flag, in a command that has these flags."""
    for said, others in _INSTEAD.items():
        if name.replace("_", "-") in others.split() and {*re.findall(r"--[\w-]+", said)} <= flags:
            return said
    return None


def _described(command: Any, ctx: Any) -> Iterator[tuple[str, str, str]]:
    """Yield each parameter's heading, names and help."""
    for parameter in command.get_params(ctx):
        if record := parameter.get_help_record(ctx):
            kind = "Options" if parameter.param_type_name == "option" else "Arguments"
            names = re.sub(r"<list\[(\w+)\]>", r"<\1>", record[0])  # the text says "repeatable"
            yield parameter.rich_help_panel or kind, names, record[1]


def _write(formatter: Any, listed: Iterable[tuple[str, str, str]]) -> None:
    """Write names and help under their headings."""
    headings: dict[str, list[tuple[str, str]]] = {}
    for heading, names, text in listed:
        headings.setdefault(heading, []).append((names, text))
    for heading, records in headings.items():
        with formatter.section(heading):
            formatter.write_dl(records)


def _examples(lines: Iterable[str]) -> str:
    return "\b\n" + "\n".join(["Examples:", *(f"  {line}" for line in lines)])


# Control characters would let an answer move the cursor.
_CONTROLS = dict.fromkeys({*range(32), *range(127, 160)} - {ord("\n")}, " ") | {ord("\t"): "    "}


def printable(text: str) -> str:
    """Return a text with spaces instead of control characters, except newlines."""
    return text.translate(_CONTROLS)


@contextmanager
def one_sentence() -> Iterator[None]:
    """Turn an error that the user can fix into one line and exit code 1; bugs keep a traceback."""
    try:
        yield
    except (BrokenPipeError, typer.Exit):
        raise
    except FileNotFoundError as error:
        _fail(f"no such file: {error.filename}" if error.filename else error)
    except (ValueError, OSError) as error:
        _fail(error)
    except RuntimeError as error:
        from torch import OutOfMemoryError

        if not isinstance(error, OutOfMemoryError):
            raise
        _fail(error)


def _fail(error: Exception | str) -> None:
    typer.echo(printable(f"diffray: {error}"), err=True)
    raise typer.Exit(1) from None


Given = dict[str, Any]


class Fields:
    """Some fields of a model; a `typer.Option` has what the model does not say, such as names."""

    def __init__(self, model: "type[BaseModel]", panel: str, *names: str, **options: Any) -> None:
        chosen = {name: Option() for name in names} | options
        fields = model.model_fields
        self.flags = [
            _flag(name, fields[name], panel, chosen[name])
            for name in sorted(chosen, key=[*fields].index)
        ]


def with_flags(command: Callable[..., None]) -> Callable[..., None]:
    """Return the command as Typer reads it: with a parameter for each field, and short errors."""
    own = signature(command)
    groups = {name: _flags(each.annotation) for name, each in own.parameters.items()}
    flags: list[Parameter] = []
    for name, parameter in own.parameters.items():
        flags += groups[name] or [parameter]

    @wraps(command)
    def run(**given: Any) -> None:
        for group, found in groups.items():
            values = {each.name: given.pop(each.name) for each in found}
            if values:
                given[group] = {name: value for name, value in values.items() if value is not None}
        with one_sentence():
            command(**given)

    run.__signature__ = own.replace(parameters=flags)  # type: ignore[attr-defined]  # Typer reads it
    run.__annotations__ = {each.name: each.annotation for each in flags}
    return run


def _flags(annotation: Any) -> list[Parameter]:
    parts = getattr(annotation, "__metadata__", ())  # of Annotated
    return [flag for part in parts if isinstance(part, Fields) for flag in part.flags]


def _flag(name: str, field: "FieldInfo", panel: str, given: Any) -> Parameter:
    """Return a flag as Typer reads it; one that is not typed is None, not the default."""
    option, kind, allowed = copy(given), _kind(field.annotation), _allowed(field.annotation)
    text, default = field.description or "", "on" if field.default is True else field.default
    if get_origin(kind) is list and "repeatable" not in text:
        text = f"{text.removesuffix('.')}; repeatable."
    if allowed and option.metavar:
        text += f" One of: {', '.join(allowed)}."
    elif allowed:
        option.metavar = "|".join(allowed)
    if option.show_default and default not in (None, (), {}) and default is not False:
        text += f"  [default: {default}]"
    option.help = text
    option.rich_help_panel = option.rich_help_panel or panel
    option.autocompletion = lambda: allowed
    return Parameter(
        name, Parameter.KEYWORD_ONLY, default=None, annotation=Annotated[kind | None, option]
    )


def _members(annotation: Any) -> tuple[Any, ...]:
    is_union = get_origin(annotation) in (Union, UnionType)
    return get_args(annotation) if is_union else (annotation,)


def _kind(annotation: Any) -> Any:
    """Return the type of a flag's value; what has no simple type is a text, read by the model."""
    members = _members(annotation)
    for each in members:
        if get_origin(each) in (tuple, dict) and str not in members:
            return list[get_args(each)[0]]  # type: ignore[misc]  # as Typer reads a repeatable flag
    return next((each for each in (bool, int, float, Path) if each in members), str)


def _allowed(annotation: Any) -> list[str]:
    """Return the texts that a field allows: choices, or the kinds of a policy's part."""
    from diffray.components.config import kinds

    literals = (each for each in _members(annotation) if get_origin(each) is Literal)
    return kinds(annotation) or [choice for each in literals for choice in get_args(each)]
