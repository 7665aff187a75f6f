"""The loop of one rank: it receives rounds and runs them; only rank 0 replies.

All ranks receive the same rounds in the same order, so they do the same. Tensors leave a rank only
through the model's collectives.
"""

import time

import torch

from diffray.components.backend import give_back_memory
from diffray.components.mesh import Mesh
from diffray.workers.engine import Engine
from diffray.workers.link import Link
from diffray.workers.messages import Reply, Round

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

    def _round(self, order: Round) -> Reply:
        """Cancel, admit and denoise; all ranks refuse a request that cannot run."""
        refused = []
        for uid in order.cancel:
            self.engine.cancel(uid)
        for request in order.add:
            try:
                self.engine.add(request.to_request())
            except ValueError as error:
                refused.append((request.uid, str(error)))
        before = self.engine.forwards
        updates = self.engine.step(order.steps)
        if order.check and not self._agree():
            raise Drift(
                "the ranks' canvases differ, so the ranks have drifted apart; "
                "check that they have the same GPU type, driver and version of diffray"
            )
        return Reply(
            number=order.number,
            steps=self.engine.forwards - before,
            updates=updates,
            refused=refused,
            stats=self.engine.stats(),
            worked=self.worked,
            waited=self.waited,
        )

    def _agree(self) -> bool:
        """Whether all ranks hold the same canvases; this waits for the device."""
        digest = torch.tensor([self.engine.digest()], device=self.mesh.device)
        return bool(self.mesh.all_equal(digest))
