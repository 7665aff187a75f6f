"""The prompts of a benchmark: from the box (demo, HumanEval, GSM8K) or a file of one's own."""

import json
import random
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from importlib.resources import files
from itertools import islice
from pathlib import Path
from typing import Any, Final

from diffray.cluster.cli.bench.flags import Data

BOXED: Final = ("demo", "humaneval", "gsm8k")
RANDOM: Final = "random"
FROM_FILE: Final = ("custom", "sharegpt")
NAMES: Final = (RANDOM, *BOXED, *FROM_FILE)

_WORDS: Final = (
    "time year people way day man thing woman life child world school state family student group "
    "country problem hand part place case week company system program question work government "
    "number night point home water room mother area money story fact month lot right study book"
).split()


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


def by_task(asks: Iterable[Ask]) -> dict[str, list[Ask]]:
    """Return each task's prompts, for tasks are measured one by one."""
    found: dict[str, list[Ask]] = {}
    for ask in asks:
        found.setdefault(ask.task, []).append(ask)
    return found


def random_text(words: int, draws: random.Random) -> str:
    """Return a text of so many words, hence of at least about so many tokens."""
    return " ".join(draws.choice(_WORDS) for _ in range(words))


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
