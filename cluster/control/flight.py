"""A round in flight: what its reply will settle."""

from dataclasses import dataclass

from diffray.cluster.control.queued_request import QueuedRequest
from diffray.cluster.control.weight_changes import AskedChange


@dataclass(frozen=True, slots=True)
class Flight:
    """A round that was sent and has no reply yet."""

    admitted: list[QueuedRequest]
    preempting: list[QueuedRequest]  # requests that will be resumed later
    steps: int  # at most
    asked: AskedChange | None = None

    @property
    def pages(self) -> int:
        return sum(queued.taken for queued in self.admitted)
