"""What the HTTP layer needs from an engine, wherever the engine runs."""

from collections.abc import AsyncGenerator, Collection
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, NamedTuple, Protocol

from diffray.workers.messages import Update
from diffray.workers.stats import Stats, counter, gauge

if TYPE_CHECKING:
    from diffray.cluster.control.events import Event
    from diffray.cluster.control.weight_changes import EngineChange
    from diffray.workers.admission import CheckedRequest  # imports torch
    from diffray.workers.limits import Limits
    from diffray.workers.trainer_orders import Received, TrainerOrder


class Overloaded(Exception):
    """The queue is full; retry after `retry_after` seconds."""

    retry_after: Final = 1.0


class EngineFailed(Exception):
    """The engine cannot finish a request; the message says why and whether to try again."""


class Poisonous(EngineFailed):
    """The request crashed the engine repeatedly; it must not be tried again."""

    reason: Final = (
        "this request crashed the engine repeatedly and was quarantined; change the request, and "
        "report it to the server's operator, whose log says how the workers ended"
    )


class DeadlineExceeded(Exception):
    """A request did not finish before its deadline."""


class Refusal(NamedTuple):
    """Why a coordinator refuses a request, and the exception its caller gets."""

    error: type[Overloaded] | type[EngineFailed]
    reason: str


NO_ROUNDS: Final = (0,) * 19


def round_bucket(tokens: int) -> int:
    """Return a round's index in `round_tokens`: i for at most 2**i tokens, the last for more."""
    return min(max(tokens - 1, 0).bit_length(), len(NO_ROUNDS) - 1)


@dataclass(frozen=True, slots=True)
class Load:
    """How busy an engine is, and its counters since it started."""

    running: int = gauge("num_requests_running", "Choices in the engine.")
    waiting: int = gauge("num_requests_waiting", "Choices in the queue.")
    slots: int = 0  # the most choices in the engine at once
    num_pages: int = 0
    engine: Stats = field(default_factory=Stats)  # of the latest reply
    preemptions: int = counter("num_preemptions", "Times a choice was preempted, to resume later.")
    rounds: int = counter("num_rounds", "Rounds of denoising steps.")
    tokens: int = 0  # that became final in those rounds
    round_tokens: tuple[int, ...] = NO_ROUNDS  # the rounds by tokens, see `round_bucket`
    worked: float = counter("rank_work_seconds", "Time of rank 0 in rounds.")
    waited: float = counter(
        "rank_wait_seconds", "Time of rank 0 between rounds while there was work."
    )
    restarts: int = counter("num_restarts", "Restarts of the engine, as a rank was lost.")
    coordinator_restarts: int = counter(
        "num_coordinator_restarts", "Restarts of the coordinator, and the engine with it."
    )
    weight_updates: int = counter("num_weight_updates", "Times the weights were replaced.")
    weights_version: str = "0"
    sleep_level: int = gauge("engine_sleep_level", "The engine's sleep level; 0: awake.")

    @property
    def free_pages(self) -> int:
        return self.engine.free_pages


class EngineClient(Protocol):
    """One replica's engine: in this process or behind a coordinator."""

    @property
    def limits(self) -> "Limits":
        """For `admission.check_request`, which checks requests before they are submitted."""
        ...

    def submit(
        self, request: "CheckedRequest", *, priority: int = 0, deadline: float | None = None
    ) -> AsyncGenerator[Update, None]:
        """Yield a request's updates until one has a finish reason; closing the generator cancels.

        `request.uid` must be unused. A lower `priority` runs first; `deadline` is in seconds from
        now. Raises Overloaded, EngineFailed or DeadlineExceeded.
        """
        ...

    async def apply(self, change: "EngineChange") -> str:
        """Make a change; return the weights' version. Raises ValueError with nothing changed."""
        ...

    async def ask_trainer(self, order: "TrainerOrder") -> "Received":
        """Join a trainer's group, or receive weights into a folder; raises ValueError if it fails.

        The engine's own weights stay: UpdateWeights takes the folder.
        """
        ...

    async def load(self) -> Load: ...

    async def check_health(self) -> None:
        """Raise EngineFailed if the engine cannot answer requests."""
        ...


class WaitingClient(Protocol):
    """An engine for a thread that waits for it: in this process or behind a coordinator."""

    @property
    def limits(self) -> "Limits": ...

    @property
    def open(self) -> Collection[int]:
        """The uids of the requests that run or wait."""
        ...

    def submit(self, request: "CheckedRequest") -> None: ...

    def cancel(self, uid: int) -> None: ...

    def advance(self, steps: int | None = None) -> "list[Event]":
        """Return the next events; `steps` limits the steps of each request until then."""
        ...

    def apply(self, change: "EngineChange") -> str:
        """Make a change; return the weights' version. Raises ValueError with nothing changed."""
        ...

    def ask_trainer(self, order: "TrainerOrder") -> "Received":
        """Join a trainer's group, or receive weights into a folder; may raise ValueError."""
        ...

    @property
    def level(self) -> int:
        """The sleep level; 0: awake. During sleep, `advance` raises ValueError."""
        ...

    def release(self) -> None:
        """Cancel all open requests, and free what they hold."""
        ...

    def close(self) -> None: ...
