"""`diffray completion`: the script with which a shell completes commands and options."""

from typing import Annotated, Literal

import typer
from typer.completion import shell_complete


def completion(
    context: typer.Context,
    shell: Annotated[Literal["bash", "zsh", "fish"], typer.Argument(help="The shell.")],
) -> None:
    """Print a script that makes a shell complete commands and options.

    bash reads it from a file, as below, if bash-completion is installed; else ~/.bashrc can source
    it. zsh sources it in ~/.zshrc, after compinit.
    """
    shell_complete(
        context.find_root().command, {}, "diffray", "_DIFFRAY_COMPLETE", f"source_{shell}"
    )
