"""What every answer must be, whatever was asked; and what a run found."""

import json
import statistics
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import httpx2

from diffray.cluster.api.errors import bug

LONGEST_MESSAGE = 700
LAST = ("response.completed", "response.incomplete", "message_stop")  # of streams with types


class Broken(AssertionError):
    """An answer that no request may get."""


def judge(answer: httpx2.Response, content: bytes, *, proxied: bool = False) -> str:
    """Return what kind of answer it is, or raise Broken with what is wrong.

    A proxy in front refuses some requests in its own words; behind Serve, answers of replicas have
    an id.
    """
    status = answer.status_code
    if proxied and 400 <= status < 500 and "x-request-id" not in answer.headers:
        return f"{status} by proxy"
    if status >= 500:
        raise Broken(f"status {status}: {content[:300]!r}")
    if answer.request.method == "HEAD" or (status == 405 and not content):
        return str(status)
    if status >= 400:
        _judge_refusal(answer, content)
    elif answer.headers.get("content-type", "").startswith("text/event-stream"):
        _judge_stream(content)
        return f"{status} stream"
    elif answer.headers.get("content-type", "").startswith("application/json"):
        _strict(content)
    return str(status)


def _judge_refusal(answer: httpx2.Response, content: bytes) -> None:
    if not answer.headers.get("content-type", "").startswith("application/json"):
        raise Broken(f"a refusal of type {answer.headers.get('content-type')!r}")
    body = _strict(content)
    error = body.get("error") if isinstance(body, dict) else None
    anthropics = "/v1/messages" in answer.request.url.path
    fields = {"message", "type"} if anthropics else {"message", "type", "param", "code"}
    if not isinstance(error, dict) or set(error) != fields:
        raise Broken(f"a refusal of another shape: {content[:300]!r}")
    message = error["message"]
    if not isinstance(message, str) or not 8 <= len(message) <= LONGEST_MESSAGE:
        raise Broken(f"a message of {len(str(message))} characters: {str(message)[:100]!r}")
    if "Traceback" in message or "\n" in message.strip():
        raise Broken(f"a message that is no sentence: {message[:300]!r}")
    if len(error.get("param") or "") > 300:
        raise Broken("a param that is no name")


def _judge_stream(content: bytes) -> None:
    events = [event for event in content.decode().split("\n\n") if event]
    kind, is_done = "", events[-1:] == ["data: [DONE]"]
    for event in events[:-1] if is_done else events:
        name, _, data = event.rpartition("\n")
        found = _strict(data.removeprefix("data: ").encode())
        kind = found.get("type", "")
        if name != (f"event: {kind}" if kind else ""):
            raise Broken(f"an event of the type {kind} that is called {name[:100]!r}")
        error = found.get("error") or found.get("response", {}).get("error")
        if error and error["message"] == bug().message:
            raise Broken(f"a stream that broke: {event[:300]!r}")
    if not is_done and kind not in LAST:
        raise Broken(f"a stream that ends with {events[-1:]!r:.200}")


def _strict(content: bytes) -> Any:
    def refuse(name: str) -> float:
        raise Broken(f"{name} in an answer")

    try:
        return json.loads(content, parse_constant=refuse)
    except ValueError:
        raise Broken(f"an answer that is no JSON: {content[:200]!r}") from None


@dataclass(slots=True)
class Findings:
    """The counts of a run, and its faults with what replays them."""

    answers: Counter[tuple[str, str]] = field(default_factory=Counter)  # by kind and status
    seconds: dict[str, list[float]] = field(default_factory=dict)  # by kind
    faults: list[str] = field(default_factory=list)

    def note(self, kind: str, outcome: str, seconds: float) -> None:
        self.answers[kind, outcome] += 1
        self.seconds.setdefault(kind, []).append(seconds)

    def add(self, other: "Findings") -> None:
        self.answers += other.answers
        for kind, seconds in other.seconds.items():
            self.seconds.setdefault(kind, []).extend(seconds)
        self.faults += other.faults

    @property
    def requests(self) -> int:
        return sum(self.answers.values())

    @property
    def slowest(self) -> float:
        return max((max(each) for each in self.seconds.values()), default=0.0)

    def table(self) -> str:
        """Return the figures as a table in Markdown."""
        outcomes = sorted({outcome for _, outcome in self.answers})
        head = ["kind", "requests", *outcomes, "median ms", "slowest s"]
        lines = [head, ["---"] * len(head)]
        for kind, seconds in sorted(self.seconds.items()):
            counts = [str(self.answers[kind, outcome] or "") for outcome in outcomes]
            median = f"{1e3 * statistics.median(seconds):.1f}"
            lines.append([kind, str(len(seconds)), *counts, median, f"{max(seconds):.2f}"])
        return "\n".join(f"| {' | '.join(line)} |" for line in lines)
