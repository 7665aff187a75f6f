"""Which request ends the ranks: after a loss those that may have caused it are tried one by one.

Most losses are nobody's fault, so no request fails for having been there. What was new at a loss,
or on trial, is tried first the next time, while nothing else runs; if the ranks are lost then too,
it fails, and the others go on without it. Who got no further between two losses is tried as well.
"""

from diffray.cluster.control.queued_request import QueuedRequest
from diffray.workers.messages import Schedulable

STRIKES = 2  # losses after which a request fails, if it ran alone at the last
_REMEMBERED = 1000  # arrivals for which a request that has failed so is refused, if it comes again

REASON = (
    "the engine was lost each time that it began or went on with this request, so it runs no more; "
    "change the request, and tell whoever runs the server, whose log says how the ranks ended"
)


class CrashQuarantine:
    """Those that may have caused the last loss, and the one on trial."""

    def __init__(self) -> None:
        self.queue: list[QueuedRequest] = []  # in the order of their trials
        self.on_trial: QueuedRequest | None = None
        self._guilty: dict[int, int] = {}  # what they asked, and the arrival that they were

    def __bool__(self) -> bool:
        return bool(self.queue) or self.on_trial is not None

    def judge(
        self, running: list[QueuedRequest], arrivals: int
    ) -> tuple[list[QueuedRequest], list[QueuedRequest]]:
        """Take over who ran when the ranks were lost; return who has caused that, and who not."""
        guilty: list[QueuedRequest] = []
        clear: list[QueuedRequest] = []
        for queued in running:
            new = queued is self.on_trial or not queued.answered
            queued.stuck = queued.stood == len(queued.ids)
            queued.strikes = queued.strikes + 1 if new else 0
            queued.stood = len(queued.ids)
            if len(running) == 1 and queued.strikes >= STRIKES:
                guilty.append(queued)
                self._guilty[queued.request.content] = arrivals
            elif queued.strikes or queued.stuck:
                self.queue.append(queued)
            else:
                clear.append(queued)
        self.on_trial = None
        self.queue.sort(key=lambda queued: (-queued.strikes, queued.order))
        return guilty, clear

    def is_known(self, request: Schedulable, arrivals: int) -> bool:
        """Whether a request like this one has ended the ranks not long ago."""
        if not self._guilty:
            return False
        recent = {c: at for c, at in self._guilty.items() if arrivals - at < _REMEMBERED}
        self._guilty = recent
        return request.content in recent

    def try_next(self) -> QueuedRequest:
        """Put the next one on trial."""
        self.on_trial = self.queue.pop(0)
        return self.on_trial

    def settle(self) -> None:
        """End a trial: with the round that admitted it, or where it got further than before."""
        queued = self.on_trial
        if queued is None or not queued.answered:
            return
        if queued.stuck and len(queued.ids) == queued.stood:
            return
        queued.strikes = 0
        self.on_trial = None

    def forget(self, queued: QueuedRequest) -> None:
        """The request has ended or left."""
        if queued is self.on_trial:
            self.on_trial = None
        elif queued in self.queue:
            self.queue.remove(queued)
