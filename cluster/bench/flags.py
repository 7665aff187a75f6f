"""What the flags of all benchmarks are: their types, and what help says about them."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

_DATA, _MEASURE, _RESULT = "Prompts", "Measuring", "Result"

DatasetName = Annotated[
    str,
    typer.Option(
        metavar="NAME",
        help="random, demo, humaneval, gsm8k, custom (JSON lines with prompt, max_tokens, task), "
        "sharegpt; several with commas.",
        rich_help_panel=_DATA,
    ),
]
DatasetPath = Annotated[
    Path | None,
    typer.Option(help="The file of custom or sharegpt.", rich_help_panel=_DATA),
]
NumPrompts = Annotated[
    int, typer.Option(min=1, help="At most, of each data set.", rich_help_panel=_DATA)
]
InputLen = Annotated[
    int, typer.Option(min=1, help="Tokens of a random prompt.", rich_help_panel=_DATA)
]
PrefixLen = Annotated[
    int,
    typer.Option(
        min=0,
        help="Tokens that all random prompts begin with, before those; an engine of this process "
        "shares their K/V only with --enable-prefix-caching.",
        rich_help_panel=_DATA,
    ),
]
OutputLen = Annotated[int, typer.Option(min=1, help="Tokens to write.", rich_help_panel=_DATA)]
MaybeOutputLen = Annotated[
    int | None,
    typer.Option(
        min=1,
        help="Tokens to write; left out: what the file says, else 128.",
        rich_help_panel=_DATA,
    ),
]
IgnoreEos = Annotated[
    bool,
    typer.Option(
        "--ignore-eos",
        help="Let nothing end a text; random prompts imply it.",
        rich_help_panel=_DATA,
    ),
]
Seed = Annotated[int, typer.Option(help="Of prompts and arrivals.", rich_help_panel=_DATA)]

BatchSize = Annotated[
    str,
    typer.Option(
        metavar="N[,N...]", help="Requests at once; several: a sweep.", rich_help_panel=_MEASURE
    ),
]
Warmup = Annotated[
    int, typer.Option(min=0, help="Generations before the clock.", rich_help_panel=_MEASURE)
]
Iterations = Annotated[
    int, typer.Option(min=1, help="Timed generations.", rich_help_panel=_MEASURE)
]
MaxNumSeqs = Annotated[
    int,
    typer.Option(min=1, help="Sequences that the engine runs at once.", rich_help_panel=_MEASURE),
]
StepsPerRound = Annotated[
    int,
    typer.Option(min=1, help="Steps between looks at their result.", rich_help_panel=_MEASURE),
]

OutputJson = Annotated[
    Path | None, typer.Option(help="Write the numbers there.", rich_help_panel=_RESULT)
]
Report = Annotated[
    Path | None,
    typer.Option(
        metavar="OUT.html",
        help="Write tables and plots there, as one file.",
        rich_help_panel=_RESULT,
    ),
]


@dataclass(frozen=True, slots=True)
class Data:
    """What is asked."""

    dataset_name: DatasetName = "random"
    dataset_path: DatasetPath = None
    num_prompts: NumPrompts = 1000
    input_len: InputLen = 1024
    random_prefix_len: PrefixLen = 0
    output_len: MaybeOutputLen = None
    ignore_eos: IgnoreEos = False


@dataclass(frozen=True, slots=True)
class Result:
    """Where the numbers go, beside the terminal."""

    output_json: OutputJson = None
    report: Report = None
