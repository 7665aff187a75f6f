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
from diffray.cluster.cli.doctor import doctor
from diffray.cluster.cli.flag_records import flag, record, spread, typed
from diffray.cluster.cli.help import Command, command_line, examples
from diffray.cluster.cli.serve import serve
from diffray.components.checkpoints.demos import DEMOS, EXAMPLE, HUB_ID

app = command_line()
bench = command_line("Measure latency and throughput, of an engine or of a server.")


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
    """Serve diffusion language models."""


@record("Output")
class Output:
    watch: bool = flag(False, "--watch", help="Show the masks turn into text.")
    stats: bool = flag(False, "--stats", help="Print tokens, forwards and tokens/s on stderr.")


@spread
def generate(
    prompt: flags.Prompt = None,
    *,
    model: flags.Model = "demo",
    engine: flags.Engine,
    answer: flags.Answer,
    raw: flags.Raw = False,
    diffusion: flags.Diffusion,
    output: Output,
) -> None:
    """Answer one prompt, without a server.

    The prompt is sent as a chat message if the model has a chat template.
    """
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
    measured = print_answer(llm, as_prompt(llm, text, raw=raw), params, watch=output.watch)
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
    typer.echo(EXAMPLE, err=True)
    return EXAMPLE


def convert(
    source: flags.Checkpoint,
    target: Annotated[Path, typer.Argument(help="The folder to create.")],
) -> None:
    """Rewrite a mixture-of-experts checkpoint to load faster."""
    from diffray.components.checkpoints import convert as fused

    typer.echo(str(fused.convert(source, target)))


def info(model: flags.Checkpoint, as_json: flags.Json = False) -> None:
    """Show a checkpoint's size, memory and possible rank counts."""
    from diffray.cluster.cli.facts import as_lines, as_values
    from diffray.components.checkpoints.info import describe

    found = describe(model)
    typer.echo(json.dumps(as_values(found), indent=2) if as_json else as_lines(found))


_DENSE, _SPARSE = "GSAI-ML/LLaDA-8B-Instruct", "inclusionAI/LLaDA-MoE-7B-A1B-Instruct"


def _add(
    command: Callable[..., None], *shown: str, to: typer.Typer = app, cls: type[Command] = Command
) -> None:
    to.command(cls=cls, epilog=examples(*shown))(command)


# In the order in which help lists them.
_add(
    serve,
    "diffray serve",
    f"diffray serve {_SPARSE} --tp 2 --ep --port 8080",
    "diffray serve --config models.yaml",
)
_add(chat, "diffray chat", "diffray chat --base-url http://HOST:8000 --temperature 0.7")
_add(
    generate,
    "diffray generate --watch",
    f'diffray generate "Why is the sky blue?" --model {_DENSE}',
    "diffray generate - --set decoder.threshold=0.8 < prompt.txt",
)
_add(
    batch,
    "diffray batch in.jsonl out.jsonl --base-url http://127.0.0.1:8000",
    f"diffray batch in.jsonl out.jsonl --model {_DENSE}",
)
_add(status, "diffray status", "diffray status --address HOST:6379")
_add(doctor, "diffray doctor", f"diffray doctor {_SPARSE} --dtype bfloat16 --json")
_add(info, "diffray info demo", f"diffray info {_DENSE} --json")
_add(convert, f"diffray convert {_SPARSE} fused-checkpoint")
app.add_typer(bench, name="bench")
_add(latency, "diffray bench latency --batch-size 1,8", to=bench)
_add(throughput, "diffray bench throughput --dataset-name demo --report out.html", to=bench)
_add(
    bench_serve,
    "diffray bench serve --dataset-name demo --max-concurrency 1,8",
    to=bench,
    cls=ManyValues,
)
