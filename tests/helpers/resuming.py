"""Requests that run through one engine after another, each but the last soon lost."""

from collections.abc import Callable
from collections.abc import Sequence as Items
from dataclasses import replace
from typing import NamedTuple

from diffray.workers.engine import Engine
from diffray.workers.messages import Request, Resume, Update


def updates_of(
    engine: Engine, requests: Items[Request], steps: int, rounds: int = 999
) -> list[Update]:
    for request in requests:
        engine.add(request)
    found: list[Update] = []
    for _ in range(rounds):
        if engine.idle:
            break
        found += engine.step(steps)
    return found


def cut_and_resume(
    new: Callable[[], Engine], requests: Items[Request], steps: int, cuts: Items[int]
) -> list[Update]:
    """Run so many rounds in each engine, and resume in the next from the updates alone."""
    found: list[Update] = []
    for rounds in (*cuts, 999):
        left = []
        for request in requests:
            mine = [update for update in found if update.uid == request.uid]
            if not mine or not mine[-1].finish_reason:
                left.append(replace(request, resume=Resume.after(mine)))
        found += updates_of(new(), left, steps, rounds)
    return found


class Story(NamedTuple):
    """All that one request's updates say, however they are divided, but the work done."""

    facts: dict[str, object]
    numbers: list[float]  # probabilities of any kind

    @staticmethod
    def of(updates: Items[Update], uid: int) -> "Story":
        mine = [update for update in updates if update.uid == uid]
        top = [pairs for update in mine for pairs in update.top_logprobs]
        last = mine[-1]
        facts: dict[str, object] = {
            "finish": [update.finish_reason for update in mine if update.finish_reason],
            "stop_id": last.stop_id,
            "ids": [token for update in mine for token in update.ids],
            "steps": [step for update in mine for step in update.steps],
            "top_logprobs": [[token for token, _ in pairs] for pairs in top],
            "fields": {path: [*options] for path, (_, options) in last.fields.items()},
        }
        numbers = [number for update in mine for number in update.logprobs]
        numbers += [number for pairs in top for _, number in pairs]
        for probability, options in last.fields.values():
            numbers += [probability, *options.values()]
        return Story(facts, numbers)
