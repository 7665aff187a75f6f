"""Which request ends the ranks: after a loss those that may have caused it are tried one by one.

Most losses are nobody's fault, so no request fails for having been there. What was new at a loss,
or on trial, is tried first the next time, while nothing else runs; if the ranks are lost then too,
it fails, and the others go on without it. Who got no further between two losses is tried as well.
"""

from diffray.cluster.control.queued_request import Ticket
from diffray.workers.messages import WireRequest

STRIKES = 2  # losses after which a request fails, if it ran alone at the last
_REMEMBERED = 1000  # arrivals for which a request that has failed so is refused, if it comes again

REASON = (
    "the engine was lost each time that it began or went on with this request, so it runs no more; "
    "change the request, and tell whoever runs the server, whose log says how the ranks ended"
)


class Suspects:
    """Those that may have caused the last loss, and the one on trial."""

    def __init__(self) -> None:
        self.queue: list[Ticket] = []  # in the order of their trials
        self.on_trial: Ticket | None = None
        self._guilty: dict[int, int] = {}  # what they asked, and the arrival that they were

    def __bool__(self) -> bool:
        return bool(self.queue) or self.on_trial is not None

    def judge(self, running: list[Ticket], arrivals: int) -> tuple[list[Ticket], list[Ticket]]:
        """Take over who ran when the ranks were lost; return who has caused that, and who not."""
        guilty: list[Ticket] = []
        clear: list[Ticket] = []
        for ticket in running:
            new = ticket is self.on_trial or not ticket.answered
            ticket.stuck = ticket.stood == len(ticket.ids)
            ticket.strikes = ticket.strikes + 1 if new else 0
            ticket.stood = len(ticket.ids)
            if len(running) == 1 and ticket.strikes >= STRIKES:
                guilty.append(ticket)
                self._guilty[_content(ticket.request)] = arrivals
            elif ticket.strikes or ticket.stuck:
                self.queue.append(ticket)
            else:
                clear.append(ticket)
        self.on_trial = None
        self.queue.sort(key=lambda ticket: (-ticket.strikes, ticket.order))
        return guilty, clear

    def is_known(self, request: WireRequest, arrivals: int) -> bool:
        """Whether a request like this one has ended the ranks not long ago."""
        if not self._guilty:
            return False
        recent = {c: at for c, at in self._guilty.items() if arrivals - at < _REMEMBERED}
        self._guilty = recent
        return _content(request) in recent

    def try_next(self) -> Ticket:
        """Put the next one on trial."""
        self.on_trial = self.queue.pop(0)
        return self.on_trial

    def settle(self) -> None:
        """End a trial: with the round that admitted it, or where it got further than before."""
        ticket = self.on_trial
        if ticket is None or not ticket.answered:
            return
        if ticket.stuck and len(ticket.ids) == ticket.stood:
            return
        ticket.strikes = 0
        self.on_trial = None

    def forget(self, ticket: Ticket) -> None:
        """The request has ended or left."""
        if ticket is self.on_trial:
            self.on_trial = None
        elif ticket in self.queue:
            self.queue.remove(ticket)


def _content(request: WireRequest) -> int:
    """Return a checksum of what was asked, whoever asked it and with whatever seed."""
    params = {name: value for name, value in request.params.items() if name != "seed"}
    return hash((request.prompt, request.suffix, repr(params)))
