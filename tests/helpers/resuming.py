"""Requests that run through one engine after another, each but the last soon lost."""

from collections.abc import Callable
from collections.abc import Sequence as Items
from dataclasses import replace

from diffray.workers.engine import Engine
from diffray.workers.messages import Request, Resume, Update


def updates_of(
    engine: Engine, requests: Items[Request], steps: int, rounds: int = 999
) -> list[Update]:
    """Run that many rounds in a new engine, if the requests take so many."""
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
