"""Estimates from hashes of prefixes how much of a prompt running requests have stored."""

from bisect import bisect_left
from collections import Counter
from math import lcm

from diffray.cluster.control.queued_request import QueuedRequest
from diffray.workers.messages import Footprint, Schedulable


class RunningPrefixes:
    """The prefixes of the running requests' prompts, in whole blocks and whole pages.

    If two prefixes have the same hash, the scheduler counts too few pages for a request, and the
    engine holds it back until there are enough.
    """

    def __init__(self, page_size: int) -> None:
        self.page_size = page_size
        self._counts: Counter[int] = Counter()

    def hashes(self, request: Schedulable, footprint: Footprint) -> tuple[int, ...]:
        """Return a hash of each prefix of the prompt, from the shortest to the longest.

        Requests share K/V only with others of the same salt, adapter and block length.
        """
        if not footprint.block:
            return ()
        unit, prompt = self._unit(footprint), request.prompt
        last, found = hash((request.cache_salt, request.lora, footprint.block)), []
        for stop in range(unit, len(prompt) + 1, unit):
            last = hash((last, prompt[stop - unit : stop]))
            found.append(last)
        return tuple(found)

    def add(self, queued: QueuedRequest) -> None:
        self._counts.update(queued.prefixes)

    def remove(self, queued: QueuedRequest) -> None:
        for each in queued.prefixes:
            self._counts[each] -= 1
            if self._counts[each] <= 0:
                del self._counts[each]

    def clear(self) -> None:
        self._counts.clear()

    def shared_pages(self, queued: QueuedRequest) -> int:
        """Return how many of a request's pages running requests already hold."""
        counts = self._counts
        # A request with a prefix has all shorter ones.
        shared = bisect_left(queued.prefixes, True, key=lambda each: each not in counts)
        return shared * self._unit(queued.footprint) // self.page_size if shared else 0

    def _unit(self, footprint: Footprint) -> int:
        return lcm(footprint.block, self.page_size)
