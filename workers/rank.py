"""The loop of one rank: it receives rounds and runs them; only rank 0 replies.

All ranks receive the same rounds in the same order, so they all do the same. Tensors leave a rank
only through the model's collectives.
"""

import time

import torch

from diffray.components.backend import give_back_memory
from diffray.components.mesh import Mesh
from diffray.components.sequence import Sequence
from diffray.workers.changes import ask_trainer
from diffray.workers.digest import digest
from diffray.workers.engine import Engine
from diffray.workers.link import Link
from diffray.workers.messages import Reply, Round, WireRequest

_BUSY = 256  # sequences times rounds after which freed memory is returned


class Drift(RuntimeError):
    """The ranks no longer agree on what they generate."""


class Rank:
    """An engine at the end of a control channel."""

    def __init__(self, engine: Engine, mesh: Mesh, link: Link) -> None:
        self.engine, self.mesh, self.link = engine, mesh, link
        # Seconds in rounds, and between rounds while there was work: the control channel's cost.
        self.worked = self.waited = 0.0

    def serve(self) -> None:
        """Run rounds until the coordinator ends them."""
        try:
            ready, busy = time.perf_counter(), 0
            while (message := self.link.receive()) is not None:
                begin = time.perf_counter()
                if not message.fresh:
                    self.waited += begin - ready
                answer = self._round(message)
                self.worked += time.perf_counter() - begin
                if self.mesh.rank == 0:
                    self.link.send(answer)
                busy += len(self.engine.running)
                if self.engine.idle and busy > _BUSY:
                    give_back_memory()
                    busy = 0
                ready = time.perf_counter()
        except ConnectionError:
            raise
        except Exception as error:
            text = f"rank {self.mesh.rank}: {type(error).__name__}: {error}"
            self.link.send(text)
            raise

    def _round(self, order: Round[WireRequest]) -> Reply:
        if order.trainer is not None:
            received = ask_trainer(self.engine.changes, order.trainer)
            return Reply(order.number, 0, [], [], self.engine.stats(), received=received)
        reply = self.engine.run(order, self._sequence)
        if order.check and not self._agree():
            raise Drift(
                "the ranks' canvases differ, so the ranks have drifted apart; "
                "check that they have the same GPU type, driver and version of diffray"
            )
        reply.worked, reply.waited = self.worked, self.waited
        return reply

    def _sequence(self, request: WireRequest) -> Sequence:
        return self.engine.check(request.to_request())

    def _agree(self) -> bool:
        """Whether all ranks hold the same canvases; this waits for the device."""
        own = torch.tensor([digest(self.engine)], device=self.mesh.device)
        return bool(self.mesh.all_equal(own))
