"""The flags that the benchmarks share: their types, their help, and the checks on them."""

from dataclasses import dataclass
from math import isfinite
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
    typer.Option(help="The file for custom or sharegpt.", rich_help_panel=_DATA),
]
NumPrompts = Annotated[
    int,
    typer.Option(min=1, help="The most prompts to take from each data set.", rich_help_panel=_DATA),
]
InputLen = Annotated[
    int, typer.Option(min=1, help="Tokens per random prompt.", rich_help_panel=_DATA)
]
PrefixLen = Annotated[
    int,
    typer.Option(
        min=0,
        help="Tokens of a common prefix in front of all random prompts; offline benchmarks share "
        "its K/V only with --enable-prefix-caching.",
        rich_help_panel=_DATA,
    ),
]
OutputLen = Annotated[
    int, typer.Option(min=1, help="Tokens to generate per prompt.", rich_help_panel=_DATA)
]
MaybeOutputLen = Annotated[
    int | None,
    typer.Option(
        min=1,
        help="Tokens to generate per prompt; default: what the file says, else 128.",
        rich_help_panel=_DATA,
    ),
]
IgnoreEos = Annotated[
    bool,
    typer.Option(
        "--ignore-eos",
        help="Generate past end tokens; implied by random prompts.",
        rich_help_panel=_DATA,
    ),
]
Seed = Annotated[
    int, typer.Option(help="The seed of prompts and arrival times.", rich_help_panel=_DATA)
]

BatchSize = Annotated[
    str,
    typer.Option(
        metavar="N[,N...]",
        help="Requests per batch; several make a sweep.",
        rich_help_panel=_MEASURE,
    ),
]
Warmup = Annotated[
    int, typer.Option(min=0, help="Warm-up generations, not timed.", rich_help_panel=_MEASURE)
]
Iterations = Annotated[
    int, typer.Option(min=1, help="Timed generations.", rich_help_panel=_MEASURE)
]
MaxNumSeqs = Annotated[
    int,
    typer.Option(min=1, help="The most sequences to run at once.", rich_help_panel=_MEASURE),
]
StepsPerRound = Annotated[
    int,
    typer.Option(
        min=1, help="Denoising steps to run before looking at the result.", rich_help_panel=_MEASURE
    ),
]

OutputJson = Annotated[
    Path | None, typer.Option(help="Write the results to this file.", rich_help_panel=_RESULT)
]
Report = Annotated[
    Path | None,
    typer.Option(
        metavar="OUT.html",
        help="Write the tables to this file, as HTML.",
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
    """Where the numbers go, beside the terminal; checked before anything is measured."""

    output_json: OutputJson = None
    report: Report = None

    def check(self) -> None:
        """Refuse files that could not be written, before hours are spent on what they would say."""
        for flag, path in (("--output-json", self.output_json), ("--report", self.report)):
            if path is not None and path.is_dir():
                raise ValueError(f"{flag} {path} is a folder; name a file in it")
            if path is not None and not path.parent.is_dir():
                raise ValueError(f"{flag} {path}: there is no folder {path.parent}; make it first")


def numbers(text: str, flag: str, *, low: float = 0.0, high: float = float("inf")) -> list[float]:
    """Return the numbers of a list typed with commas, each between the bounds."""
    try:
        found = [float(part) for part in text.split(",")]
    except ValueError:
        raise ValueError(f"{flag} {text!r} is not a list of numbers such as 1,2,4") from None
    for number in found:
        if not low <= number <= high:
            most = f" to {high:g}" if isfinite(high) else " or more"
            raise ValueError(f"{flag} must be {low:g}{most} (given: {number:g})")
    return found


def counts(text: str, flag: str, *, high: float = float("inf")) -> list[int]:
    """Return the whole numbers of a list typed with commas, each at least 1."""
    found = numbers(text, flag, low=1, high=high)
    if not all(number.is_integer() for number in found):
        raise ValueError(f"{flag} must be whole numbers (given: {text})")
    return [int(number) for number in found]
