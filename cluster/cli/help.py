"""The layout of help: groups in the order of use, long names on lines of their own, examples."""

import re
from collections.abc import Callable
from importlib import import_module
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup
from typer.main import get_command

from diffray.cluster.cli.failures import one_sentence
from diffray.cluster.cli.other_flags import instead_of

WORDS = "diffray.words"  # key in a command's context: the words typed after its name

_USAGE_ERROR: Any = typer.BadParameter.__base__  # Typer does not export it
_INSTEAD_OF_COMPLETION = ("install_completion", "show_completion")


class Group(TyperGroup):
    """Commands under their headings, then the options; `completion` is a command."""

    def get_params(self, ctx: Any) -> Any:
        found = super().get_params(ctx)
        return [each for each in found if each.name not in _INSTEAD_OF_COMPLETION]

    def format_options(self, ctx: Any, formatter: Any) -> None:
        found = [(name, self.get_command(ctx, name)) for name in self.list_commands(ctx)]
        width = max(len(name) for name, _ in found)
        groups: dict[str, list[tuple[str, str]]] = {}
        for name, command in found:
            heading = getattr(command, "rich_help_panel", None)
            text = command.get_short_help_str(limit=200) if command else ""
            group = heading if isinstance(heading, str) else "Commands"
            groups.setdefault(group, []).append((name.ljust(width), text))
        _write(groups, formatter)
        _write(_grouped(self, ctx), formatter)


class Command(TyperCommand):
    """A command with its options in groups, and errors in one sentence."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        ctx.meta[WORDS] = list(args)
        try:
            return super().parse_args(ctx, args)
        except _USAGE_ERROR as error:
            flags = [name for each in self.params for name in (*each.opts, *each.secondary_opts)]
            name = getattr(error, "option_name", None)  # of Typer's error for unknown options
            if name and (said := instead_of(name, flags)):
                raise _USAGE_ERROR(f"No such option: {name}; {said}", ctx) from None
            if "extra argument" in error.message and "--model" in flags:
                error.message += "; the model goes after --model, a text of several words in quotes"
            error.message = error.message.removeprefix("Value error, ")  # pydantic's words
            raise

    def invoke(self, ctx: Any) -> Any:
        with one_sentence():
            return super().invoke(ctx)

    def format_options(self, ctx: Any, formatter: Any) -> None:
        groups = _grouped(self, ctx)
        first = {name: groups.pop(name) for name in ("Arguments",) if name in groups}
        _write(first | groups, formatter)


class Later(TyperCommand):
    """A command as help lists it; its callback builds the real command when it is used."""

    def make_context(self, *given: Any, **more: Any) -> Any:
        return self.load().make_context(*given, **more)

    def load(self) -> TyperCommand:
        made: TyperCommand = self.callback()  # type: ignore[misc]  # `later` made it
        return made


def later(module: str, name: str, end: str) -> Callable[[], TyperCommand]:
    """Return a function that imports `module` and makes a command of its function `name`."""

    def load() -> Any:
        alone = typer.Typer(
            add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False
        )
        alone.command(name, cls=Command, epilog=end)(getattr(import_module(module), name))
        return get_command(alone)

    return load


def command_line(text: str, *shown: str) -> typer.Typer:
    """Return a group of commands whose help is plain text: Typer's tables cut long options."""
    return typer.Typer(
        cls=Group,
        help=text,
        epilog=examples(*shown),
        context_settings={"help_option_names": ["-h", "--help"]},
        no_args_is_help=True,
        rich_markup_mode=None,
        pretty_exceptions_enable=False,
    )


def _grouped(command: Any, ctx: Any) -> dict[str, list[tuple[str, str]]]:
    groups: dict[str, list[tuple[str, str]]] = {}
    for parameter in command.get_params(ctx):
        if (record := parameter.get_help_record(ctx)) is None:
            continue
        kind = "Options" if parameter.param_type_name == "option" else "Arguments"
        group = getattr(parameter, "rich_help_panel", None) or kind
        names, text = record
        names = re.sub(r"<list\[(\w+)\]>", r"<\1>", names)  # the text says "repeatable"
        groups.setdefault(group, []).append((names, text))
    return groups


def _write(groups: dict[str, list[tuple[str, str]]], formatter: Any) -> None:
    for group, records in groups.items():
        with formatter.section(group):
            formatter.write_dl(records)


def examples(*lines: str) -> str:
    """Return the examples at the end of a command's help."""
    return "\b\n" + "\n".join(["Examples:", *(f"  {line}" for line in lines)])
