"""The tasks of an evaluation: rows of data, a template that makes prompts, and a scorer."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from itertools import islice
from pathlib import Path
from typing import Any, Final, Literal

from jinja2 import StrictUndefined
from jinja2.sandbox import ImmutableSandboxedEnvironment
from pydantic import Field

from diffray.cluster.cli.evaluation.sandbox import check_sandbox
from diffray.cluster.cli.evaluation.scorers import SCORERS, Row, check_row
from diffray.cluster.control.yaml_file import read_yaml
from diffray.components.config import Config
from diffray.components.spelling import did_you_mean

BUNDLED: Final = Path(str(files("diffray"))) / "prompts"
Url = Literal["/v1/chat/completions", "/v1/completions"]
Json = dict[str, Any]
ALL: Final = "all"  # how a report calls its tasks together


Scorer = Literal[
    "exact", "contains", "regex", "choice", "number", "json", "schema", "code", "completion"
]


class Task(Config):
    """How the rows of a file of JSON lines become requests, and answers scores."""

    data: str = Field(description="The file, relative to this one.")
    template: str = Field(
        "{{ prompt }}", description="The prompt, a Jinja template over the fields of a row."
    )
    scorer: Scorer = Field("exact", description="How answers are scored.")
    max_tokens: int = Field(256, ge=1, description="The most tokens of an answer.")
    chat: bool = Field(True, description="Ask as a chat; else let the model continue the prompt.")
    stop: list[str] = Field([], description="Texts that end an answer.")
    shots: int = Field(
        0, ge=0, description="The last rows of the data, shown as examples and not asked."
    )
    shot: str = Field("", description="The template of an example.")
    guided: bool = Field(False, description="Let answers take only what a row's schema allows.")


@dataclass(frozen=True, slots=True)
class Item:
    """One question of a task."""

    task: str
    name: str  # within the task
    url: Url
    body: Json  # without the model and the policy
    scorer: str
    row: Row

    @property
    def prompt(self) -> str:
        """The text that is asked; of a conversation the last message."""
        if "prompt" in self.body:
            return str(self.body["prompt"])
        return str(self.body["messages"][-1].get("content", ""))

    def score(self, text: str) -> float:
        return SCORERS[self.scorer](text, self.row)


def read_items(names: str, limit: int | None, max_tokens: int | None = None) -> list[Item]:
    """Return the questions of comma-separated tasks: bundled ones, or files.

    `max_tokens` replaces what the tasks say.
    """
    found: dict[str, list[Item]] = {}
    for name in map(str.strip, names.split(",")):
        for title, task, folder in _named(name):
            if title == ALL:
                raise ValueError(f"no task may be called {ALL!r}; rename the file")
            if title in found:
                raise ValueError(f"--tasks has {title!r} twice; leave one out")
            if max_tokens is not None:
                task = task.model_copy(update={"max_tokens": max_tokens})
            found[title] = list(items(title, task, folder, limit))
    if any(item.scorer in ("code", "completion") for each in found.values() for item in each):
        check_sandbox()
    return [item for each in found.values() for item in each]


def _named(name: str) -> Iterator[tuple[str, Task, Path]]:
    """Yield the tasks of a name, with the folder of their data."""
    path = Path(name)
    if path.suffix == ".jsonl":
        yield path.stem, Task(data=path.name), path.parent
    elif path.suffix in (".yaml", ".yml"):
        for title, task in tasks_of(path).items():
            yield title, task, path.parent
    else:
        known = tasks_of(BUNDLED / "tasks.yaml")
        if name not in known:
            near = did_you_mean(name, known)
            raise ValueError(
                f"there is no task {name!r}{near or ';'} Allowed: {', '.join(known)}, or a file "
                "that ends with .jsonl or .yaml"
            )
        yield name, known[name], BUNDLED


@cache
def tasks_of(path: Path) -> dict[str, Task]:
    """Return the tasks of a YAML file: names, each with a task."""
    given = read_yaml(path)
    if not given or not isinstance(given, dict) or not all(map(_is_mapping, given.values())):
        raise ValueError(f"{path}: expected names, each with a task: mine: {{data: mine.jsonl}}")
    try:
        return {str(name): Task(**each) for name, each in given.items()}
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


def _is_mapping(given: object) -> bool:
    return isinstance(given, dict) and all(isinstance(name, str) for name in given)


def items(title: str, task: Task, folder: Path, limit: int | None) -> Iterator[Item]:
    """Yield at most `limit` questions of a task."""
    if bool(task.shots) != bool(task.shot):
        raise ValueError(
            f"task {title!r}: shots says how many examples there are, shot how they look"
        )
    path = folder / task.data
    try:
        rows = list(_rows(path))
    except FileNotFoundError:
        raise ValueError(f"{path}: there is no such file") from None
    asked = rows[: max(len(rows) - task.shots, 0)]
    if not asked:
        raise ValueError(
            f"{path} has {len(rows)} rows, too few to ask one after {task.shots} shots"
        )
    shown = "".join(_filled(task.shot, row, f"{path}, an example") for _, row in rows[len(asked) :])
    seen: set[str] = set()
    for number, row in islice(asked, limit):
        place = f"{path}, line {number}"
        try:
            check_row(task.scorer, row)
        except ValueError as error:
            raise ValueError(f"{place}: {error}") from None
        name = str(row.get("id", number))
        if name in seen:
            raise ValueError(f"{place}: the id {name!r} is there twice; ids must differ")
        seen.add(name)
        body: Json = {"max_tokens": task.max_tokens, "temperature": 0}
        if task.stop:
            body["stop"] = task.stop
        if task.guided and "schema" not in row:
            raise ValueError(f"{place}: guided answers need 'schema'")
        if task.guided:
            body["structured_outputs"] = {"json": row["schema"]}
        if "messages" in row:
            body["messages"] = _messages(row["messages"], task, place)
        elif task.chat:
            prompt = shown + _filled(task.template, row, place)
            body["messages"] = [{"role": "user", "content": prompt}]
        else:
            body["prompt"] = shown + _filled(task.template, row, place)
        url: Url = "/v1/chat/completions" if task.chat else "/v1/completions"
        yield Item(title, name, url, body, task.scorer, row)


def _rows(path: Path) -> Iterator[tuple[int, Json]]:
    """Yield the rows of a file of JSON lines, with the numbers of their lines."""
    with path.open(encoding="utf-8") as file:
        for number, text in enumerate(file, 1):
            if not text.strip():
                continue
            try:
                row = json.loads(text)
            except ValueError as error:
                raise ValueError(f"{path}, line {number}: not valid JSON ({error})") from None
            if not isinstance(row, dict):
                raise ValueError(f"{path}, line {number}: expected an object")
            yield number, row


_JINJA: Final = ImmutableSandboxedEnvironment(undefined=StrictUndefined, keep_trailing_newline=True)


def _filled(template: str, row: Mapping[str, Any], place: str) -> str:
    try:
        return _JINJA.from_string(template).render(row)
    except Exception as error:  # a template is a program: it may divide by zero
        raise ValueError(f"{place}: {error}, for the template {template!r}") from None


def _messages(given: Any, task: Task, place: str) -> list[Json]:
    """Check the conversation of a row, which needs no template."""
    if not task.chat or task.shots or "template" in task.model_fields_set:
        raise ValueError(f"{place}: a row with messages takes no template, shots or chat: false")
    if not given or not isinstance(given, list) or not all(isinstance(m, dict) for m in given):
        raise ValueError(f"{place}: messages must be a list of objects")
    return given
