"""The layout of help: options in groups, long names on lines of their own, examples last."""

from typing import Any

import typer
from typer.core import TyperCommand

from diffray.cluster.cli.failures import one_sentence


def command_line(text: str | None = None) -> typer.Typer:
    """Return a group of commands whose help is plain text: Typer's tables cut long options."""
    return typer.Typer(
        help=text,
        no_args_is_help=True,
        add_completion=False,
        rich_markup_mode=None,
        pretty_exceptions_enable=False,
    )


class Command(TyperCommand):
    """A command with its options in groups, and errors in one sentence."""

    def invoke(self, ctx: Any) -> Any:
        with one_sentence():
            return super().invoke(ctx)

    def format_options(self, ctx: Any, formatter: Any) -> None:
        groups: dict[str, list[tuple[str, str]]] = {}
        for parameter in self.get_params(ctx):
            if (record := parameter.get_help_record(ctx)) is not None:
                kind = "Options" if parameter.param_type_name == "option" else "Arguments"
                group = getattr(parameter, "rich_help_panel", None) or kind
                groups.setdefault(group, []).append(record)
        for group, records in sorted(groups.items(), key=lambda each: each[0] != "Arguments"):
            with formatter.section(group):
                formatter.write_dl(records)


def examples(*lines: str) -> str:
    """Return the end of a command's help."""
    return "\b\n" + "\n".join(["Examples:", *(f"  {line}" for line in lines)])
