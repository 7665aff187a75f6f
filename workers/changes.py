"""Replaces a running engine's weights and puts it to sleep, on all ranks or on none."""

from collections.abc import Mapping
from pathlib import Path

from torch import Tensor

from diffray.components.checkpoints.update import (
    HasParts,
    NewWeights,
    Updatable,
    first_weights,
    weights_of_folder,
    weights_of_tensors,
)
from diffray.components.kv_pool import KVPool
from diffray.components.mesh import Mesh
from diffray.components.models.fields import Config
from diffray.workers.messages import ASLEEP, AWAKE, WITHOUT_WEIGHTS, Change
from diffray.workers.receiver import Receiver
from diffray.workers.sleeper import Sleeper
from diffray.workers.trainer_orders import Received, TrainerOrder

FIXED = "the weights of this engine cannot be replaced"
_TORN = (
    "the last update of the weights was interrupted, so they are of two versions; update them again"
)
_GIVEN_UP = "the weights came as tensors and were discarded in sleep; update them again"
_OTHER_RANK = "another rank refused the weights; its log says why"


class Changes:
    """Applies changes to an engine; `plan` is its model without storage.

    `first` is the folder of the weights that it was loaded with, `received` the folder for weights
    that a trainer sends.
    """

    def __init__(
        self,
        model: Updatable,
        plan: HasParts,
        config: Config,
        kv: KVPool,
        mesh: Mesh,
        *,
        first: Path,
        sleeper: Sleeper,
        received: str | None = None,
    ) -> None:
        self._model, self._plan, self._config = model, plan, config
        self._kv, self._mesh = kv, mesh
        self._first, self._sleeper = first, sleeper
        self._source: str | None = None  # of the weights; None: `first`; empty: tensors
        self._stale = False  # whether the weights have to be read when the engine wakes
        self.given: dict[int, Mapping[str, Tensor]] = {}  # for changes without a source
        self._broken = ""  # what is wrong with the weights
        self.receiver = Receiver(plan, config, mesh, received, lambda: self._source or "")

    @property
    def unfit(self) -> str:
        """Why no request can run; empty if requests can run."""
        return self._broken if self._sleeper.level == AWAKE else ASLEEP

    def apply(self, change: Change) -> str:
        """Apply a change while no request runs; if it is refused, change nothing and return why."""
        if change.restores:
            refusal = self._replace(change) if change.source else ""
            return refusal or self._sleep(change.level or AWAKE)
        if change.level is None:
            return self._replace(change)
        return self._sleep(change.level)

    def _replace(self, change: Change) -> str:
        """Replace the weights, or in sleep remember which ones to read on waking."""
        found, refusal = None, ""
        try:
            found = self._checked(change)
        except (ValueError, OSError) as error:
            refusal = str(error)
        if refusal := self._refused(found, refusal):
            return refusal
        if self._sleeper.level == AWAKE:
            self._copy(found)
        self._source, self._stale = change.source, self._sleeper.level != AWAKE
        return ""

    def _refused(self, found: NewWeights | None, refusal: str) -> str:
        """Return why the weights do not fit on some rank; empty if they fit on all."""
        if self._mesh.smallest("weights", int(found is not None)) == 0 or found is None:
            return refusal or _OTHER_RANK
        return ""

    def _copy(self, found: NewWeights | None) -> None:
        assert found is not None
        self._broken = _TORN
        found.copy()
        self._mesh.smallest("copied", 1)  # a collective might time out before the slowest rank
        self._broken = ""
        self._kv.forget_prefixes()

    def _checked(self, change: Change) -> NewWeights:
        if change.source:
            return weights_of_folder(self._model, self._plan, self._config, change.source)
        given = self.given.pop(change.number)
        if self._sleeper.level != AWAKE:
            raise ValueError("a sleeping engine takes weights from folders only; wake it up first")
        found = weights_of_tensors(self._model, self._plan, given)
        if self._broken and not found.whole:
            raise ValueError(f"{self._broken}, with all tensors of the model")
        return found

    def _sleep(self, level: int) -> str:
        if level == AWAKE:
            return self._wake() if self._sleeper.level != AWAKE else ""
        self._stale |= level == WITHOUT_WEIGHTS
        self._sleeper.sleep(level)
        return ""

    def _wake(self) -> str:
        """Take the memory back, and read the weights if they were discarded or replaced."""
        found, refusal = None, ""
        if self._stale and self._source != "":
            try:
                found = self._known()
            except (ValueError, OSError) as error:
                refusal = str(error)
            if refusal := self._refused(found, refusal):
                return refusal
        self._sleeper.wake()
        if found is not None:
            self._copy(found)
        elif self._stale:
            self._broken = _GIVEN_UP
        self._stale = False
        self._sleeper.settle()
        return ""

    def _known(self) -> NewWeights:
        """Return the weights that the engine should have, from their folder."""
        if self._source is None:
            return first_weights(self._model, self._plan, self._config, self._first)
        return weights_of_folder(self._model, self._plan, self._config, self._source)


def ask_trainer(changes: Changes | None, order: TrainerOrder) -> Received:
    """Have an engine join a trainer's group or receive weights, which does not change its own."""
    return Received(FIXED) if changes is None else changes.receiver.carry_out(order)
