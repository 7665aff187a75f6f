"""Types of bodies' fields that clients may write in more than one way, with their limits."""

from typing import Annotated, Any, Final

from pydantic import BeforeValidator, Field, PlainValidator

_MOST_PROMPTS: Final = 1024
_NO_PROMPT: Final = "expected a text, a list of token ids, or a list of several of these"


def _as_prompts(given: Any) -> list[str | list[int]]:
    """Return a list of prompts; a text or a flat list of ids is one prompt."""
    several = [given] if isinstance(given, str) or (given and _are_ids(given)) else given
    if not several or not isinstance(several, list):
        raise ValueError(_NO_PROMPT)
    if len(several) > _MOST_PROMPTS:
        raise ValueError(f"at most {_MOST_PROMPTS} prompts go into one request")
    if not all(isinstance(each, str) or _are_ids(each) for each in several):
        raise ValueError(_NO_PROMPT)
    return several


def _are_ids(given: Any) -> bool:
    return isinstance(given, list) and all(type(token) is int for token in given)


def _as_biases(given: Any) -> dict[int, float]:
    if not isinstance(given, dict) or len(given) > 1024:
        raise ValueError("expected an object of at most 1024 token ids and their biases")
    biases = {}
    for token, bias in given.items():
        if not (str(token).isascii() and str(token).isdigit() and len(str(token)) < 19):
            raise ValueError(f"{str(token)[:40]!r} is not a token id")
        if type(bias) not in (int, float) or not -100 <= bias <= 100:
            raise ValueError(f"token {token}: a bias is a number from -100 to 100")
        biases[int(token)] = float(bias)
    return biases


def _as_list(given: Any) -> Any:
    return [given] if isinstance(given, str) else given


Ids = list[int]
Prompts = Annotated[
    list[str | list[int]],
    PlainValidator(_as_prompts, json_schema_input_type=str | list[str] | Ids | list[Ids]),
]
Biases = Annotated[
    dict[int, float], PlainValidator(_as_biases, json_schema_input_type=dict[str, float])
]
# `fail_fast` reports only a list's first error; millions of errors would take gigabytes.
Word = Annotated[str, Field(min_length=1, max_length=1000)]
Stops = Annotated[
    list[Word],
    Field(max_length=32, fail_fast=True),
    BeforeValidator(_as_list, json_schema_input_type=Word | list[Word]),
]
TokenIds = Annotated[list[int], Field(max_length=1024, fail_fast=True)]
