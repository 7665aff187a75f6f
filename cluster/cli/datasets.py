"""The prompts of a benchmark: bundled (demo, chat, HumanEval, GSM8K), from a file, or random."""

import json
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.resources import files
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from pydantic import Field

from diffray.components.config import Config

if TYPE_CHECKING:  # help does not need them
    from diffray.cluster.control.llm import DiffusionLLM
    from diffray.components.params import SamplingParams

    Work = tuple[list[list[int]], list[SamplingParams]]

BUNDLED: Final = ("demo", "chat", "humaneval", "gsm8k")
RANDOM: Final = "random"
FROM_FILE: Final = "custom"
NAMES: Final = (RANDOM, *BUNDLED, FROM_FILE)
_RANDOM_PROMPTS = 32  # unless typed
_USUAL: Final = {"demo": 96, "gsm8k": 256}  # unless typed: these sets have more, for `eval`


class Data(Config):
    """The prompts of a benchmark of throughput."""

    dataset_name: str = Field(
        RANDOM,
        description="random, demo, chat, humaneval, gsm8k, or custom: JSON lines with prompt, "
        "max_tokens, task.",
    )
    dataset_path: Path | None = Field(None, description="The file for custom.")
    num_prompts: int | None = Field(
        None,
        ge=1,
        description="The most prompts to take from each data set; default: 96 of demo, 256 of "
        f"gsm8k, {_RANDOM_PROMPTS} random ones, all of the others.",
    )
    input_len: int = Field(128, ge=1, description="Tokens per random prompt.")
    random_prefix_len: int = Field(
        0,
        ge=0,
        description="Tokens of a common prefix before each random prompt, whose K/V are shared "
        "only with --enable-prefix-caching.",
    )
    output_len: int | None = Field(
        None,
        ge=1,
        description="Tokens to generate per prompt; default: the file's number, else 128.",
    )
    ignore_eos: bool = Field(
        False, description="Generate past end tokens; implied by random prompts."
    )
    seed: int = Field(0, description="The seed of prompts and sampling.")

    @property
    def num_random(self) -> int:
        return self.num_prompts or _RANDOM_PROMPTS


@dataclass(frozen=True, slots=True)
class Row:
    """One prompt; `max_tokens` only where the file sets it."""

    task: str
    prompt: str
    max_tokens: int | None = None


def read_sets(data: Data) -> list[tuple[str, list[Row]]]:
    """Return the prompts of each data set, by name; those of `random` are made later."""
    names, path = data.dataset_name.split(","), data.dataset_path
    if data.random_prefix_len and RANDOM not in names:
        raise ValueError(
            f"--dataset-name {data.dataset_name} has no random prompts; leave out "
            "--random-prefix-len, or add random"
        )
    if path is not None and FROM_FILE not in names:
        raise ValueError(
            f"--dataset-name {data.dataset_name} reads no file; leave out --dataset-path, or add "
            "custom"
        )
    return [
        (name, [] if name == RANDOM else read_rows(name, path, data.num_prompts)) for name in names
    ]


def read_rows(name: str, path: Path | None, count: int | None) -> list[Row]:
    """Return at most `count` prompts of a data set that is not random; None: as many as usual.

    `path` is the file for `custom`, JSON lines with `prompt` and perhaps `max_tokens` and `task`.
    """
    if name not in NAMES:
        raise ValueError(f"there is no data set {name!r}; allowed: {', '.join(NAMES)}")
    if name in BUNDLED:
        path = Path(str(files("diffray"))) / "prompts" / f"{name}.jsonl"
    if path is None:
        raise ValueError(f"--dataset-name {name} needs --dataset-path FILE")
    rows = list(islice(_lines(path, name), count or _USUAL.get(name)))
    if not rows:
        raise ValueError(f"{path} has no prompts")
    return rows


def random_ids(
    llm: "DiffusionLLM", count: int, length: int, seed: int, prefix_len: int = 0
) -> list[list[int]]:
    """Return prompts of random ids from the vocabulary, without end, mask and image tokens.

    All start with the same `prefix_len` ids, followed by `length` ids of their own.
    """
    limits = llm.engine.limits
    barred = {*limits.eos_token_ids, limits.mask_token_id}
    if limits.spec.sight is not None:
        barred.add(limits.spec.sight.token_id)
    allowed = [id for id in range(limits.spec.vocab_size) if id not in barred]
    draws = random.Random(seed)
    prefix = draws.choices(allowed, k=prefix_len)
    return [prefix + draws.choices(allowed, k=length) for _ in range(count)]


def as_ids(llm: "DiffusionLLM", rows: Sequence[Row], *, raw: bool) -> list[list[int]]:
    """Return the prompts as ids, as chat messages if the model has a chat template."""
    tokenizer = llm.tokenizer
    if tokenizer is None:
        raise ValueError("the checkpoint has no tokenizer.json, so it takes --dataset-name random")
    if raw or not tokenizer.fast.chat_template:
        return [tokenizer.encode(row.prompt) for row in rows]
    return [tokenizer.encode_chat([{"role": "user", "content": row.prompt}]) for row in rows]


def tasks(
    llm: "DiffusionLLM",
    data: Data,
    sets: Sequence[tuple[str, list[Row]]],
    params: "SamplingParams",
    *,
    raw: bool = False,
) -> "dict[str, Work]":
    """Return each task's prompts and parameters; a typed length overrides lengths in a file."""
    found: dict[str, Work] = {}
    typed = params.model_fields_set
    for name, read in sets:
        if name == RANDOM:
            changed = {} if "ignore_eos" in typed else {"ignore_eos": True}
            count = data.num_random
            prompts = random_ids(llm, count, data.input_len, data.seed, data.random_prefix_len)
            found[name] = prompts, [params.model_copy(update=changed)] * count
        for task in dict.fromkeys(row.task for row in read):
            rows = [row for row in read if row.task == task]
            lengths = [None if "max_tokens" in typed else row.max_tokens for row in rows]
            found[task] = (
                as_ids(llm, rows, raw=raw),
                [params.model_copy(update={"max_tokens": n} if n else {}) for n in lengths],
            )
    return found


def _lines(path: Path, name: str) -> Iterator[Row]:
    with path.open(encoding="utf-8") as file:
        for number, line in enumerate(file, 1):
            if line.strip():
                yield _row(line, name, f"{path}, line {number}")


def _row(line: str, name: str, place: str) -> Row:
    given = _parse(line, place)
    if not isinstance(given, dict) or not isinstance(given.get("prompt"), str):
        raise ValueError(f"{place}: expected an object with a text under 'prompt'")
    length = given.get("max_tokens", given.get("output_tokens"))
    if length is not None and (not isinstance(length, int) or length < 1):
        raise ValueError(f"{place}: max_tokens must be a whole number, at least 1")
    task = given.get("task", name)
    if not isinstance(task, str):
        raise ValueError(f"{place}: task must be a text")
    return Row(task, given["prompt"], length)


def _parse(text: str, place: str) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:
        raise ValueError(f"{place}: not valid JSON ({error})") from None
