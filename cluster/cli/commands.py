"""What Typer lacks: commands imported when used, headings in plain help, and advice on errors.

Help is plain text because Typer's tables cut long flags in a terminal of 80 columns.
"""

import re
from collections.abc import Iterable, Iterator
from importlib import import_module
from typing import Any, Final

import typer
from typer.core import TyperCommand, TyperGroup
from typer.main import get_command

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


def add(to: typer.Typer, panel: str | None, function: str, text: str, *shown: str) -> None:
    """Add a command, as MODULE.NAME within this folder, with its line in help and examples."""
    module, _, name = function.rpartition(".")

    def load() -> Any:
        from diffray.cluster.cli.model_flags import with_flags  # help of all commands is quicker

        alone = typer.Typer(add_completion=False, rich_markup_mode=None)
        command = getattr(import_module(f"diffray.cluster.cli.{module}"), name)
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
