"""An engine client that answers every request alike and remembers it."""

from collections.abc import AsyncGenerator
from dataclasses import replace

from diffray.cluster.control.engine_client import DeadlineExceeded, Load
from diffray.cluster.control.weight_changes import EngineChange, Sleep
from diffray.components.checkpoints.update import Source
from diffray.workers.admission import CheckedRequest
from diffray.workers.limits import Limits
from diffray.workers.messages import Request, Update
from diffray.workers.trainer_orders import Received, TrainerOrder
from tests.helpers.byte_tokenizer import TOKENIZER
from tests.helpers.toy import ToyModel, toy_engine

# The toy's, with a vocabulary in which every byte has its token.
TOY = toy_engine(ToyModel()).limits


LIMITS = replace(TOY, spec=replace(TOY.spec, vocab_size=300))


class Recorder:
    """An engine that answers every request with the bytes of one text, and remembers it."""

    def __init__(self, limits: Limits = LIMITS, text: str = "abc", reason: str = "length") -> None:
        self.limits, self._reason = limits, reason
        self.ids = TOKENIZER.encode(text)
        self.level = 0
        self.updates: list[tuple[Source, str, str | None]] = []
        self.orders: list[TrainerOrder] = []
        self.requests: list[tuple[Request, int, float | None]] = []

    async def submit(
        self, request: CheckedRequest, *, priority: int = 0, deadline: float | None = None
    ) -> AsyncGenerator[Update, None]:
        self.requests.append((request.request, priority, deadline))
        if deadline is not None:
            raise DeadlineExceeded("too slow")
        cached = len(request.prompt)
        for number, token in enumerate(self.ids, 1):
            last = self._reason if number == len(self.ids) else None
            heard = Update(request.uid, [token], [number - 1], [-0.5], last, forwards=number)
            heard.cached_tokens = cached
            yield heard

    async def load(self) -> Load:
        return Load(running=1, waiting=2, sleep_level=self.level)

    async def ask_trainer(self, order: TrainerOrder) -> Received:
        self.orders.append(order)
        return Received(folder="/received")

    async def check_health(self) -> None: ...

    async def apply(self, change: EngineChange) -> str:
        if isinstance(change, Sleep):
            self.level = change.level
            return str(len(self.updates))
        self.updates.append((change.source, change.in_flight, change.version))
        return change.version or str(len(self.updates))
