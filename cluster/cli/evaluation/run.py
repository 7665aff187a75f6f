"""Runs an evaluation: every policy answers every question, into one folder a policy.

    OUT/POLICY/requests.jsonl   what is asked, in OpenAI's batch format
    OUT/POLICY/answers.jsonl    the answers, appended as they arrive
    OUT/POLICY/rows.jsonl       a row for each answer: its tokens, their steps, its score

A run continues with the requests that have no answer yet, so SIGKILL loses those in flight alone.
"""

import asyncio
import json
import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractAsyncContextManager, closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final
from zlib import crc32

from filelock import FileLock, Timeout

from diffray.cluster.api.batch_lines import Answer, Line, Reply, answer_lines
from diffray.cluster.cli.batch_run import Progress, Summary, appended
from diffray.cluster.cli.endpoint import complaint, message_of
from diffray.cluster.cli.evaluation.policies import NamedPolicy
from diffray.cluster.cli.evaluation.tasks import Item

Json = dict[str, Any]
_WARM_UP: Final = {"cache_salt": "warm-up"}
Backend = Callable[[Json], AbstractAsyncContextManager[Answer]]  # given options of an engine


@dataclass(frozen=True, slots=True)
class Asked:
    """What a run asks: the same of every policy."""

    model: str
    items: Sequence[Item]
    samples: int = 1
    seed: int = 0
    concurrency: int = 8
    engine: Json = field(default_factory=dict)  # what was typed; a server is {"server": true}

    def lines(self, policy: NamedPolicy) -> Iterator[tuple[Item, int, Line]]:
        """Yield the requests of a policy, with the number of the sample.

        A question has the same seeds under all policies, whatever else is asked. Only a policy's
        own requests share K/V.
        """
        for item in self.items:
            for sample in range(self.samples):
                name = f"{item.task}/{item.name}/{sample}"
                body = {"model": self.model, "seed": self.seed + crc32(name.encode())}
                body |= {"return_trajectory": True, "cache_salt": policy.name}
                body |= item.body | policy.request
                yield item, sample, Line(custom_id=name, method="POST", url=item.url, body=body)


class Folder:
    """The files of one policy."""

    def __init__(self, out: Path, policy: NamedPolicy, asked: Asked) -> None:
        self.policy, self.path, self.asked = policy, out / policy.folder, asked
        self.lines = list(asked.lines(policy))
        self.answers = self.path / "answers.jsonl"
        self._tasks = {line.custom_id: item.task for item, _, line in self.lines}
        self.pending = self._prepare()

    def _prepare(self) -> list[Line]:
        """Write the requests; return those that have no answer.

        An answer that failed is no answer. What was asked otherwise before is refused.
        """
        about = self.path / "how.json"
        known = {each["custom_id"]: each for each in _read(self.path / "requests.jsonl")}
        asked = {line.custom_id: line.model_dump() for _, _, line in self.lines}
        engine = self.asked.engine | self.policy.engine
        how = json.loads(json.dumps({"engine": engine, "concurrency": self.asked.concurrency}))
        same = all(known.get(name, line) == line for name, line in asked.items())
        if known and not (same and _read(about) == [how]):
            raise ValueError(
                f"{self.path} holds answers to other requests (another model, policy, engine, "
                "concurrency or seed); give another --out, or delete it"
            )
        self.path.mkdir(parents=True, exist_ok=True)
        _write(about, [how])
        _write(self.path / "requests.jsonl", (known | asked).values())
        answered = [each for each in _read(self.answers) if _is_answer(each)]
        _write(self.answers, answered)
        names = {each["custom_id"] for each in answered}
        return [line for _, _, line in self.lines if line.custom_id not in names]

    async def fill(self, answer: Answer, progress: Progress) -> None:
        """Append the answers that are missing, task by task, so that each has its own time.

        The first requests are sent twice: what an engine does once (compiling, recording graphs)
        counts for no policy.
        """
        most = self.asked.concurrency
        warm_up = [answer(line.url, line.body | _WARM_UP) for line in self.pending[:most]]
        await asyncio.gather(*warm_up, return_exceptions=True)
        for task in dict.fromkeys(self._tasks.values()):
            lines = [line for line in self.pending if self._tasks[line.custom_id] == task]
            at_once = min(most, len(lines))
            with appended(self.answers, progress) as done:
                await answer_lines(iter(lines), _timed(answer), done, at_once)

    async def check(self, answer: Answer) -> None:
        """Send one request; raise if the server refuses it, before others run for hours."""
        line = self.pending[0]
        reply = await answer(line.url, line.body | _WARM_UP)
        if reply.status_code == 400:
            raise ValueError(f"policy {self.policy.name!r}: {message_of(reply.body)}")

    def score(self) -> list[Json]:
        """Return a row for each answer, and write them."""
        answers = {each["custom_id"]: each for each in _read(self.answers)}
        found = [
            (item, sample, answers[line.custom_id]["response"]["body"])
            for item, sample, line in self.lines
            if _is_answer(answers.get(line.custom_id, {}))
        ]
        with ThreadPoolExecutor(os.cpu_count()) as pool:  # a sandbox is a process of its own
            rows = list(pool.map(lambda each: row_of(self.policy.name, *each), found))
        _write(self.path / "rows.jsonl", rows)
        return rows

    def failures(self) -> list[str]:
        """Return why requests failed."""
        names = {line.custom_id for _, _, line in self.lines}
        failed = (each for each in _read(self.answers) if not _is_answer(each))
        return [_reason(each) for each in failed if each["custom_id"] in names]


def row_of(policy: str, item: Item, sample: int, body: Json) -> Json:
    """Return what an evaluation keeps of an answer, whose tokens it counts as a benchmark does."""
    choice = body["choices"][0]
    text = (choice["message"]["content"] if "message" in choice else choice["text"]) or ""
    trajectory = choice["trajectory"]
    ended = choice["finish_reason"] == "stop" and not isinstance(choice["stop_reason"], str)
    length = len(trajectory["token_ids"]) - ended
    return {
        "policy": policy,
        "task": item.task,
        "item": item.name,
        "sample": sample,
        "prompt": item.prompt,
        "text": text,
        "expected": item.row.get("answer"),
        "finish_reason": choice["finish_reason"],
        "tokens": trajectory["token_ids"][:length],
        "steps": trajectory["steps"][:length],
        "logprobs": trajectory["logprobs"][:length],
        "forwards": body["diffusion"]["forwards"],
        **body["eval"],
        "score": item.score(text),
    }


async def answer_all(folders: Sequence[Folder], backend: Backend, summary: Summary) -> None:
    """Send what is pending, policy by policy; those with the same engine share one."""
    engines: dict[str, list[Folder]] = {}
    for folder in folders:
        if folder.pending:
            engine = json.dumps(folder.policy.engine, sort_keys=True)
            engines.setdefault(engine, []).append(folder)
    with closing(Progress(summary)) as progress:
        for engine, group in engines.items():
            async with backend(json.loads(engine)) as answer:
                for folder in group:
                    await folder.check(answer)
                for folder in group:
                    await folder.fill(answer, progress)


def _timed(answer: Answer) -> Answer:
    """Return the same, with a note in each answer of when it ran."""

    async def timed(url: str, body: Json) -> Reply:
        began, clock = time.time(), time.perf_counter()
        reply = await answer(url, body)
        if reply.status_code == 200 and isinstance(reply.body, dict):
            seconds = round(time.perf_counter() - clock, 6)
            reply.body["eval"] = {"began": round(began, 6), "seconds": seconds}
        return reply

    return timed


def run(
    out: Path, asked: Asked, policies: Sequence[NamedPolicy], backend: Backend
) -> tuple[Summary, list[Json], list[str]]:
    """Answer what is left; return the counts, the rows of all answers, and why requests failed."""
    with locked(out):
        folders = [Folder(out, policy, asked) for policy in policies]
        summary = summary_of(folders)
        try:
            asyncio.run(answer_all(folders, backend, summary))
        except KeyboardInterrupt:
            summary.interrupted = True
        rows = [row for folder in folders for row in folder.score()]
        return summary, rows, [each for folder in folders for each in folder.failures()]


@contextmanager
def locked(out: Path) -> Iterator[None]:
    """Keep other runs out of a folder, and this one out of folders of other things."""
    try:
        out.mkdir(parents=True, exist_ok=True)
    except FileExistsError:
        raise ValueError(f"--out {out} is a file; name a folder") from None
    if not (out / ".lock").exists() and any(out.iterdir()):
        raise ValueError(f"--out {out} has files that are not a report's; name an empty folder")
    try:
        with FileLock(out / ".lock", timeout=0):
            yield
    except Timeout:
        raise ValueError(f"another run writes into {out}; wait, or give another --out") from None


def summary_of(folders: Sequence[Folder]) -> Summary:
    """Return the counts of a run that is about to begin."""
    requests = sum(len(folder.lines) for folder in folders)
    pending = sum(len(folder.pending) for folder in folders)
    return Summary(requests, before=requests - pending)


def _is_answer(line: Json) -> bool:
    """Whether a request was answered, by a server that says how."""
    match line.get("response"):
        case {"status_code": 200, "body": {"choices": [{"trajectory": dict()}], "diffusion": _}}:
            return True
    return False


def _reason(line: Json) -> str:
    """Return why a request failed."""
    if line["error"]:
        return str(line["error"]["message"])
    found = line["response"]
    if found["status_code"] == 200:
        return "the answer has no trajectory; is the server diffray's?"
    return complaint(found["body"], found["status_code"])


def _read(path: Path) -> list[Json]:
    """Return the lines of a file, without an incomplete last one."""
    if not path.exists():
        return []
    try:
        return [json.loads(text) for text in path.read_bytes().split(b"\n")[:-1] if text]
    except ValueError as error:
        raise ValueError(f"{path} is damaged ({error}); delete it") from None


def _write(path: Path, lines: Iterable[Json]) -> None:
    """Replace a file as a whole."""
    new = path.with_suffix(".new")
    new.write_text("".join(f"{json.dumps(line, ensure_ascii=False)}\n" for line in lines))
    new.replace(path)
