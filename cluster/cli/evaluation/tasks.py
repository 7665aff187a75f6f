"""The tasks of an evaluation: rows of data, a template that makes prompts, and a scorer."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from itertools import islice
from pathlib import Path
from typing import Any, Final, Literal

from jinja2 import StrictUndefined, TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment
from pydantic import Field

from diffray.cluster.cli.evaluation.scorers import NEEDS, SCORERS, Row
from diffray.cluster.control.yaml_file import read_yaml
from diffray.components.config import Config
from diffray.components.spelling import did_you_mean

BUNDLED: Final = Path(str(files("diffray"))) / "prompts"
Url = Literal["/v1/chat/completions", "/v1/completions"]
Json = dict[str, Any]


class Task(Config):
    """How the rows of a file of JSON lines become requests, and answers scores."""

    data: str = Field(description="The file, relative to this one.")
    template: str = Field(
        "{{ prompt }}", description="The prompt, a Jinja template over the fields of a row."
    )
    scorer: Literal["exact", "contains", "regex", "choice", "number", "json", "schema", "code"] = (
        Field("exact", description="How answers are scored.")
    )
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
        return str(self.body.get("prompt") or self.body["messages"][-1]["content"])

    def score(self, text: str) -> float:
        return SCORERS[self.scorer](text, self.row)


def read_items(names: str, limit: int | None) -> list[Item]:
    """Return the questions of comma-separated tasks: bundled ones, or files."""
    found: dict[str, list[Item]] = {}
    for name in names.split(","):
        for title, task, folder in _named(name):
            if title in found:
                raise ValueError(f"--tasks has {title!r} twice; leave one out")
            found[title] = list(items(title, task, folder, limit))
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
    if not isinstance(given, dict) or not all(isinstance(each, dict) for each in given.values()):
        raise ValueError(f"{path}: expected names, each with a task: mine: {{data: mine.jsonl}}")
    try:
        return {str(name): Task(**each) for name, each in given.items()}
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


def items(title: str, task: Task, folder: Path, limit: int | None) -> Iterator[Item]:
    """Yield at most `limit` questions of a task."""
    path = folder / task.data
    try:
        rows = list(_rows(path))
    except FileNotFoundError:
        raise ValueError(f"{path}: there is no such file") from None
    asked = rows[: len(rows) - task.shots]
    if not asked:
        raise ValueError(
            f"{path} has {len(rows)} rows, too few to ask one after {task.shots} shots"
        )
    shown = "".join(_filled(task.shot, row, f"{path}, an example") for _, row in rows[len(asked) :])
    seen: set[str] = set()
    for number, row in islice(asked, limit):
        place = f"{path}, line {number}"
        for needed in NEEDS.get(task.scorer, ("answer",)):
            if needed not in row:
                raise ValueError(f"{place}: the scorer {task.scorer!r} needs {needed!r}")
        name = str(row.get("id", number))
        if name in seen:
            raise ValueError(f"{place}: the id {name!r} is there twice; ids must differ")
        seen.add(name)
        body: Json = {"max_tokens": task.max_tokens, "temperature": 0}
        if task.stop:
            body["stop"] = task.stop
        if task.guided:
            body["structured_outputs"] = {"json": row["schema"]}
        prompt = shown + _filled(task.template, row, place)
        if task.chat:
            messages = row.get("messages") or [{"role": "user", "content": prompt}]
            body["messages"] = messages
        else:
            body["prompt"] = prompt
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
    if "messages" in row and template == Task.model_fields["template"].default:
        return ""
    try:
        return _JINJA.from_string(template).render(row)
    except TemplateError as error:
        raise ValueError(f"{place}: {error}, for the template {template!r}") from None
