"""`diffray generate`: answer one prompt in this process."""

import sys
from typing import Annotated

import typer

from diffray.cluster.cli import flags
from diffray.cluster.cli.commands import refuse
from diffray.cluster.cli.request_options import sampling_params
from diffray.components.checkpoints.demos import DEMOS, EXAMPLE, HUB_ID


def generate(
    context: typer.Context,
    prompt: Annotated[
        str | None,
        typer.Argument(help="The prompt; - reads it from stdin. The demo models have an example."),
    ] = None,
    *,
    model: flags.Model = "demo",
    watch: Annotated[
        bool, typer.Option("--watch", help="Show how masks turn into text, step by step.")
    ] = False,
    pace: flags.Pace = flags.PACE,
    stats: Annotated[
        bool, typer.Option("--stats", help="Print tokens, forwards and tokens/s on stderr.")
    ] = False,
    answer: flags.Answer,
    raw: flags.Raw = False,
    diffusion: flags.Diffusion,
    settings: flags.Settings = None,
    engine: flags.Engine,
) -> None:
    """Answer one prompt, without a server.

    The prompt is sent as a chat message if the model has a chat template.
    """
    if not watch:
        refuse(context, "without --watch", ("pace",))
    params = sampling_params(answer | diffusion, settings)
    if params.logprobs:
        raise ValueError(
            "the command line prints no logprobs; leave them out, or request them in Python or "
            "through the API of a server"
        )
    text = _read_prompt(prompt, model)
    from diffray.cluster.cli.print_answer import as_prompt, print_answer
    from diffray.cluster.control.llm import DiffusionLLM

    llm = DiffusionLLM(model, max_num_seqs=1, **engine)
    prepared = as_prompt(llm, text, raw=raw)
    measured = print_answer(llm, prepared, params, pace=pace if watch else None)
    if stats:
        typer.echo(str(measured), err=True)


def _read_prompt(prompt: str | None, model: str) -> str:
    """Return the prompt; without one, print a demo model's example on stderr and return it."""
    if prompt is not None:
        text = sys.stdin.read().removesuffix("\n") if prompt == "-" else prompt
        if not text:
            raise ValueError("the prompt is empty; give a text")
        return text
    if model not in DEMOS:
        if "/" not in model or not HUB_ID.fullmatch(model):
            from diffray.components.checkpoints.folder import resolve

            resolve(model)  # reports a wrong path first; downloads nothing
        raise typer.BadParameter("give a prompt, or - to read it from stdin", param_hint="PROMPT")
    from rich.console import Console
    from rich.text import Text

    console = Console(stderr=True)
    console.print(Text(EXAMPLE), soft_wrap=not console.is_terminal)  # words are broken only there
    return EXAMPLE
