"""Finds the request that crashes the worker group: suspects run alone, one after the other.

Most crashes have nothing to do with a request, so none fails for having run during one. Suspects
are requests that had just been admitted, that were on trial, or that made no progress between two
crashes. A suspect that crashes the workers again while it runs alone fails.
"""

from diffray.cluster.control.queued_request import QueuedRequest
from diffray.workers.messages import Schedulable

CRASHES = 2  # after this many a request fails, if it ran alone at the last one
_REMEMBERED = 1000  # arrivals during which the same request is refused again

REASON = (
    "this request crashed the engine repeatedly and was quarantined; change the request, and "
    "report it to the server's operator, whose log says how the workers ended"
)


class CrashQuarantine:
    """The suspects of the last crash, and the one on trial."""

    def __init__(self) -> None:
        self.queue: list[QueuedRequest] = []  # suspects, in the order of their trials
        self.on_trial: QueuedRequest | None = None
        self._guilty: dict[int, int] = {}  # the count of arrivals then, by a request's content

    def __bool__(self) -> bool:
        return bool(self.queue) or self.on_trial is not None

    def judge(
        self, running: list[QueuedRequest], arrivals: int
    ) -> tuple[list[QueuedRequest], list[QueuedRequest]]:
        """Sort the requests that ran during a crash; return the guilty and the cleared."""
        guilty: list[QueuedRequest] = []
        clear: list[QueuedRequest] = []
        for queued in running:
            new = queued is self.on_trial or not queued.answered
            queued.no_progress = queued.tokens_at_crash == len(queued.ids)
            queued.crashes = queued.crashes + 1 if new else 0
            queued.tokens_at_crash = len(queued.ids)
            if len(running) == 1 and queued.crashes >= CRASHES:
                guilty.append(queued)
                self._guilty[queued.request.content] = arrivals
            elif queued.crashes or queued.no_progress:
                self.queue.append(queued)
            else:
                clear.append(queued)
        self.on_trial = None
        self.queue.sort(key=lambda queued: (-queued.crashes, queued.order))
        return guilty, clear

    def is_known(self, request: Schedulable, arrivals: int) -> bool:
        """Return whether a request like this one was quarantined recently."""
        if not self._guilty:
            return False
        recent = {c: at for c, at in self._guilty.items() if arrivals - at < _REMEMBERED}
        self._guilty = recent
        return request.content in recent

    def try_next(self) -> QueuedRequest:
        self.on_trial = self.queue.pop(0)
        return self.on_trial

    def settle(self) -> None:
        """End a survived trial: after its first round or, if the request was stuck, progress."""
        queued = self.on_trial
        if queued is None or not queued.answered:
            return
        if queued.no_progress and len(queued.ids) == queued.tokens_at_crash:
            return
        queued.crashes = 0
        self.on_trial = None

    def forget(self, queued: QueuedRequest) -> None:
        if queued is self.on_trial:
            self.on_trial = None
        elif queued in self.queue:
            self.queue.remove(queued)
