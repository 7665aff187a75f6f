"""The command line: serve models, generate text, convert and describe checkpoints.

Commands import what they need when they run, so that help is quick.
"""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer

import diffray
from diffray.cluster.cli import flags
from diffray.cluster.cli.bench.offline import latency, throughput
from diffray.cluster.cli.bench.online import ManyValues
from diffray.cluster.cli.bench.online import serve as bench_serve
from diffray.cluster.cli.client_commands import batch, chat, status
from diffray.cluster.cli.completion import completion
from diffray.cluster.cli.doctor import doctor
from diffray.cluster.cli.flag_records import flag, record, refuse_flags, spread, typed
from diffray.cluster.cli.help import Command, command_line, examples
from diffray.cluster.cli.serve import serve
from diffray.components.checkpoints.demos import DEMOS, EXAMPLE, HUB_ID

app = command_line(
    "Serve diffusion language models, and watch them write.",
    "diffray serve               # a toy model, its API and its page",
    "diffray chat                # talk to it from another terminal",
    "diffray generate --watch    # the same without a server, step by step",
    "diffray serve --help        # every command has more examples",
)
bench = command_line(
    "Measure latency and throughput, of an engine or of a server.",
    "diffray bench latency --batch-size 1,8",
    "diffray bench serve --dataset-name demo --max-concurrency 1,8",
)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"diffray {diffray.__version__}")
        raise typer.Exit


@app.callback()
def main(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the version."
        ),
    ] = False,
) -> None:
    """Serve diffusion language models, and watch them write."""


@record("Output")
class Output(flags.Watching):
    watch: bool = flag(False, "--watch", help="Show how masks turn into text, step by step.")
    stats: bool = flag(False, "--stats", help="Print tokens, forwards and tokens/s on stderr.")


@spread
def generate(
    context: typer.Context,
    prompt: flags.Prompt = None,
    *,
    model: flags.Model = "demo",
    output: Output,
    answer: flags.Answer,
    raw: flags.Raw = False,
    diffusion: flags.Diffusion,
    engine: flags.Engine,
) -> None:
    """Answer one prompt, without a server.

    The prompt is sent as a chat message if the model has a chat template.
    """
    if not output.watch:
        refuse_flags(context, "without --watch", ("pace",))
    text = _read_prompt(prompt, model)
    from diffray.cluster.cli.print_answer import as_prompt, print_answer
    from diffray.cluster.cli.request_options import sampling_params
    from diffray.cluster.control.llm import DiffusionLLM

    params = sampling_params(answer, diffusion)
    if params.logprobs:
        raise ValueError(
            "the command line prints no logprobs; leave them out, or request them in Python or "
            "through the API of a server"
        )
    llm = DiffusionLLM(model, max_num_seqs=1, **typed(engine))
    pace = output.pace if output.watch else None
    measured = print_answer(llm, as_prompt(llm, text, raw=raw), params, pace=pace)
    if output.stats:
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
            from diffray.components.checkpoints.checkpoint import resolve

            resolve(model)  # a wrong path is reported first; nothing is downloaded for it
        raise typer.BadParameter("give a prompt, or - to read it from stdin", param_hint="PROMPT")
    from diffray.cluster.cli.rows import wrapped

    typer.echo("\n".join(wrapped(EXAMPLE)) if sys.stderr.isatty() else EXAMPLE, err=True)
    return EXAMPLE


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


_DENSE, _SPARSE = "GSAI-ML/LLaDA-8B-Instruct", "inclusionAI/LLaDA-MoE-7B-A1B-Instruct"


def _add(
    panel: str | None,
    command: Callable[..., None],
    *shown: str,
    to: typer.Typer = app,
    cls: type[Command] = Command,
) -> None:
    to.command(cls=cls, epilog=examples(*shown), rich_help_panel=panel)(command)


# In the order in which help lists them.
_ASK, _INSPECT, _PREPARE = "Serve and ask", "Inspect", "Prepare and measure"
_add(
    _ASK,
    serve,
    "diffray serve",
    f"diffray serve {_SPARSE} --tp 2 --ep --port 8080",
    "diffray serve demo demo-llada2",
    "diffray serve --config models.yaml",
)
_add(
    _ASK,
    chat,
    "diffray chat",
    "diffray chat --base-url http://HOST:8000 --temperature 0.7 --pace 20",
)
_add(
    _ASK,
    generate,
    "diffray generate --watch",
    f'diffray generate "Why is the sky blue?" --model {_DENSE}',
    "diffray generate - --set decoder.threshold=0.8 < prompt.txt",
)
_add(
    _ASK,
    batch,
    "diffray batch in.jsonl out.jsonl --base-url http://127.0.0.1:8000",
    f"diffray batch in.jsonl out.jsonl --model {_DENSE}",
)
_add(_INSPECT, status, "diffray status", "diffray status --address HOST:6379")
_add(_INSPECT, doctor, "diffray doctor", f"diffray doctor {_SPARSE} --dtype bfloat16 --json")
_add(_INSPECT, info, "diffray info demo", f"diffray info {_DENSE} --json")
_add(_PREPARE, convert, f"diffray convert {_SPARSE} fused-checkpoint")
_add(
    _PREPARE,
    quantize,
    "diffray quantize demo demo-int8",
    "diffray quantize demo-llada2 smaller -q experts=int4,attention=int8",
)
app.add_typer(bench, name="bench", rich_help_panel=_PREPARE)
_add(
    "Shell",
    completion,
    "diffray completion bash > ~/.local/share/bash-completion/completions/diffray",
    "diffray completion zsh > ~/.diffray.zsh    # source it in ~/.zshrc",
    "diffray completion fish > ~/.config/fish/completions/diffray.fish",
)
_add(None, latency, "diffray bench latency --batch-size 1,8", to=bench)
_add(None, throughput, "diffray bench throughput --dataset-name demo --report out.html", to=bench)
_add(
    None,
    bench_serve,
    "diffray bench serve --dataset-name demo --max-concurrency 1,8",
    to=bench,
    cls=ManyValues,
)
