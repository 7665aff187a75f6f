"""News on its way from the ranks to who asked: bounded, and none lost if an answer is.

Who does not take its updates gets several in one: the tokens of all, the canvas of the last.
"""

import asyncio
from typing import Any

UPDATE, FAILED, LATE, POISON = "update", "failed", "late", "poison"  # [kind, uid, ...]
ENDED = "ended"  # [kind, reason]: no request will be answered any more
AGAIN = "the replica is of no more use, and another one may be asked again"

PIECES = 32  # updates of one request that wait one by one

Item = list[Any]


def pile(pieces: list[Item], item: Item) -> None:
    """Add news of a request to those that nobody has taken yet; the last may become longer."""
    last = pieces[-1] if pieces else None
    if last is None or len(pieces) < PIECES or item[0] != UPDATE or last[0] != UPDATE:
        pieces.append(item)
        return
    old, new = last[2], item[2]  # as `Update.pack` makes them
    for at in (1, 2, 3, 8):  # ids, steps, logprobs, top_logprobs
        old[at] += new[at]
    for at in (4, 5, 6, 7, 9, 10):  # finish_reason, stop_id, forwards, progress, canvas, cached
        old[at] = new[at]


class Mailbox:
    """The news of one request, for one reader."""

    def __init__(self) -> None:
        self._pieces: list[Item] = []
        self._there = asyncio.Event()

    def put(self, item: Item) -> None:
        pile(self._pieces, item)
        self._there.set()

    async def get(self) -> Item:
        await self._there.wait()
        item = self._pieces.pop(0)
        if not self._pieces:
            self._there.clear()
        return item


class Bulletin:
    """The news of all requests in numbered issues; the last one is kept until it has arrived."""

    def __init__(self) -> None:
        self._number = 0
        self._last: list[Item] = []
        self._next: dict[int, list[Item]] = {}
        self._there = asyncio.Event()

    def put(self, item: Item) -> None:
        uid = item[1] if item[0] != ENDED else -1
        pile(self._next.setdefault(uid, []), item)
        self._there.set()

    async def after(self, number: int, patience: float) -> tuple[int, list[Item]]:
        """Return the issue after this one with its number, or nothing new after `patience` s."""
        try:
            async with asyncio.timeout(patience):
                while number == self._number and not self._next:
                    await self._there.wait()
        except TimeoutError:
            return number, []
        if number == self._number:
            self._number += 1
            self._last = [item for pieces in self._next.values() for item in pieces]
            self._next = {}
            self._there.clear()
        return self._number, self._last
