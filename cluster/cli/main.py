"""The command line: its commands, in the order in which help lists them.

A command's module is imported only when the command is used, so that help is quick.
"""

from functools import partial
from typing import Annotated

import typer

import diffray
from diffray.cluster.cli.commands import add, group

app = group(
    "Serve diffusion language models, and watch them write.",
    "diffray serve               # a toy model, its API and its page",
    "diffray chat                # talk to it from another terminal",
    "diffray generate --watch    # the same without a server, step by step",
    "diffray serve --help        # every command has more examples",
)
bench = group(
    "Measure an engine in this process: latency and throughput.",
    "diffray bench latency --batch-size 1,8",
    "diffray bench throughput --dataset-name demo",
)


def _print_version(asked: bool) -> None:
    if asked:
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


_PREPARE = "Prepare and measure"
_DENSE, _SPARSE = "GSAI-ML/LLaDA-8B-Instruct", "inclusionAI/LLaDA-MoE-7B-A1B-Instruct"
_ask = partial(add, app, "Serve and ask")
_inspect = partial(add, app, "Inspect")
_prepare = partial(add, app, _PREPARE)
_measure = partial(add, bench, None)

# In the order in which help lists them.
_ask(
    "serve.serve",
    "Serve models through an OpenAI-compatible API on Ray.",
    "diffray serve",
    f"diffray serve {_SPARSE} --tp 2 --ep --port 8080",
    "diffray serve demo demo-llada2",
    "diffray serve --config models.yaml",
)
_ask(
    "chat.chat",
    "Chat with a server, in the terminal or line by line from stdin.",
    "diffray chat",
    "diffray chat --base-url http://HOST:8000 --temperature 0.7 --pace 20",
)
_ask(
    "generate.generate",
    "Answer one prompt, without a server.",
    "diffray generate --watch",
    f'diffray generate "Why is the sky blue?" --model {_DENSE}',
    "diffray generate - --set decoder.threshold=0.8 < prompt.txt",
)
_ask(
    "batch.batch",
    "Answer a file of requests, with a server or a model loaded here.",
    "diffray batch in.jsonl out.jsonl --base-url http://127.0.0.1:8000",
    f"diffray batch in.jsonl out.jsonl --model {_DENSE}",
)
_inspect(
    "checkpoint_commands.doctor",
    "Check this machine, and on a GPU the kernels for a model.",
    "diffray doctor",
    f"diffray doctor {_SPARSE} --dtype bfloat16 --json",
)
_inspect(
    "checkpoint_commands.info",
    "Show a checkpoint's size, memory and possible rank counts.",
    "diffray info demo",
    f"diffray info {_DENSE} --json",
)
_inspect(
    "plan.plan",
    "Predict how a model fits a GPU: memory, requests at once, speed.",
    f"diffray plan {_DENSE} --gpu L40S --context 4096",
    "diffray plan demo --gpu L4 --tp 2 -q int8 --json",
)
_prepare(
    "checkpoint_commands.convert",
    "Rewrite a mixture-of-experts checkpoint to load faster.",
    f"diffray convert {_SPARSE} fused-checkpoint",
)
_prepare(
    "checkpoint_commands.quantize",
    "Write a copy of a checkpoint with weights in fewer bits.",
    "diffray quantize demo demo-int8",
    "diffray quantize demo-llada2 smaller -q experts=int4,attention=int8",
)
_prepare(
    "evaluation.command.evaluate",
    "Measure the accuracy and speed of policies over tasks.",
    f"diffray eval {_DENSE} --tasks gsm8k,humaneval --out report",
    "diffray eval demo --tasks demo --policies policies.yaml --out report",
    name="eval",
)
_prepare(
    "evaluation.command.tune",
    "Find the fastest policy that is as accurate as a reference.",
    "diffray tune demo --task demo --max-loss 1pp --minutes 5 --out tuned",
)
app.add_typer(bench, name="bench", rich_help_panel=_PREPARE)
_measure(
    "bench.latency",
    "Measure the latency of batches of random prompts.",
    "diffray bench latency --batch-size 1,8",
)
_measure(
    "bench.throughput",
    "Measure the throughput over data sets.",
    "diffray bench throughput --dataset-name demo --output-json out.json",
)
