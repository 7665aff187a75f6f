"""The prompts of a benchmark: from the box (demo, HumanEval, GSM8K) or a file of one's own."""

import json
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.resources import files
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from diffray.cluster.cli.bench.flags import Data

if TYPE_CHECKING:  # serve needs neither
    from diffray.cluster.control.llm import DiffusionLLM
    from diffray.components.params import SamplingParams

    Work = tuple[list[list[int]], list[SamplingParams]]

BOXED: Final = ("demo", "humaneval", "gsm8k")
RANDOM: Final = "random"
FROM_FILE: Final = ("custom", "sharegpt")
NAMES: Final = (RANDOM, *BOXED, *FROM_FILE)


@dataclass(frozen=True, slots=True)
class Ask:
    """One prompt; `max_tokens` is there where the file says it."""

    task: str
    prompt: str
    max_tokens: int | None = None


def read_asks(name: str, path: Path | None, count: int) -> list[Ask]:
    """Return at most `count` prompts of a data set that is not random.

    `custom` is a file of JSON lines with `prompt` and, if wanted, `max_tokens` and `task`;
    `sharegpt` a JSON file of conversations, whose first messages are the prompts.
    """
    if name not in NAMES:
        raise ValueError(f"there is no data set {name!r}; allowed: {', '.join(NAMES)}")
    if (path is None) == (name in FROM_FILE):
        raise ValueError(
            f"--dataset-name {name} needs --dataset-path FILE"
            if path is None
            else f"--dataset-name {name} reads no file; leave out --dataset-path, or say custom"
        )
    if path is None:
        path = Path(str(files("diffray"))) / "prompts" / f"{name}.jsonl"
    asks = list(islice(_sharegpt(path) if name == "sharegpt" else _lines(path, name), count))
    if not asks:
        raise ValueError(f"{path} has no prompts")
    return asks


def read_sets(data: Data) -> list[tuple[str, list[Ask]]]:
    """Return the prompts of each data set of a list with commas; random has none yet.

    The file is that of `custom` or `sharegpt`, and refused where neither is asked for.
    """
    names, path, count = data.dataset_name, data.dataset_path, data.num_prompts
    listed = names.split(",")
    if data.random_prefix_len and RANDOM not in listed:
        raise ValueError(
            f"--dataset-name {names} has prompts of its own; leave out --random-prefix-len, "
            "or say random"
        )
    if path is not None and not set(listed) & set(FROM_FILE):
        raise ValueError(
            f"--dataset-name {names} reads no file; leave out --dataset-path, or say custom"
        )
    found = []
    for name in listed:
        own = path if name in FROM_FILE else None
        found.append((name, [] if name == RANDOM else read_asks(name, own, count)))
    return found


def random_ids(
    llm: "DiffusionLLM", count: int, length: int, seed: int, prefix_len: int = 0
) -> list[list[int]]:
    """Return prompts of ids drawn from the vocabulary, without end tokens and the mask.

    All begin with the same `prefix_len` ids, before `length` of their own.
    """
    limits = llm.engine.limits
    barred = {*limits.eos_token_ids, limits.mask_token_id}
    allowed = [id for id in range(limits.spec.vocab_size) if id not in barred]
    draws = random.Random(seed)
    prefix = draws.choices(allowed, k=prefix_len)
    return [prefix + draws.choices(allowed, k=length) for _ in range(count)]


def as_ids(llm: "DiffusionLLM", asks: Sequence[Ask], *, raw: bool) -> list[list[int]]:
    """Return the prompts as ids, as chat messages where the model has a chat template."""
    tokenizer = llm.tokenizer
    if tokenizer is None:
        raise ValueError("the checkpoint has no tokenizer.json, so it takes --dataset-name random")
    if raw or not tokenizer.fast.chat_template:
        return [tokenizer.encode(ask.prompt) for ask in asks]
    return [tokenizer.encode_chat([{"role": "user", "content": ask.prompt}]) for ask in asks]


def tasks(
    llm: "DiffusionLLM",
    sets: Sequence[tuple[str, list[Ask]]],
    data: Data,
    *,
    seed: int,
    raw: bool,
    params: "SamplingParams",
) -> "dict[str, Work]":
    """Return each task's prompts and parameters; a file's lengths hold where none was typed."""
    found: dict[str, Work] = {}
    typed = params.model_fields_set
    for name, read in sets:
        if name == RANDOM:
            changed = {} if "ignore_eos" in typed else {"ignore_eos": True}
            prompts = random_ids(
                llm, data.num_prompts, data.input_len, seed, data.random_prefix_len
            )
            found[name] = prompts, [params.model_copy(update=changed)] * data.num_prompts
        for task in dict.fromkeys(ask.task for ask in read):
            asks = [ask for ask in read if ask.task == task]
            lengths = [None if "max_tokens" in typed else ask.max_tokens for ask in asks]
            found[task] = (
                as_ids(llm, asks, raw=raw),
                [params.model_copy(update={"max_tokens": n} if n else {}) for n in lengths],
            )
    return found


def _lines(path: Path, name: str) -> Iterator[Ask]:
    with path.open(encoding="utf-8") as file:
        for number, line in enumerate(file, 1):
            if line.strip():
                yield _ask(_parse(line, f"{path}, line {number}"), name, f"{path}, line {number}")


def _ask(given: Any, name: str, place: str) -> Ask:
    if not isinstance(given, dict) or not isinstance(given.get("prompt"), str):
        raise ValueError(f"{place}: expected an object with a text under 'prompt'")
    length = given.get("max_tokens", given.get("output_tokens"))
    if length is not None and (not isinstance(length, int) or length < 1):
        raise ValueError(f"{place}: max_tokens must be a whole number, at least 1")
    task = given.get("task", name)
    if not isinstance(task, str):
        raise ValueError(f"{place}: task must be a text")
    return Ask(task, given["prompt"], length)


def _sharegpt(path: Path) -> Iterator[Ask]:
    conversations = _parse(path.read_text(encoding="utf-8"), str(path))
    for conversation in conversations if isinstance(conversations, list) else []:
        match conversation:
            case {"conversations": [{"value": str(first)}, _, *_]}:
                yield Ask("sharegpt", first)


def _parse(text: str, place: str) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:
        raise ValueError(f"{place}: no JSON ({error})") from None
