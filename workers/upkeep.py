"""Replaces the weights of a running engine, on all of its ranks or on none."""

from collections.abc import Mapping

from torch import Tensor

from diffray.components.checkpoints.update import (
    HasParts,
    NewWeights,
    Updatable,
    weights_of_folder,
    weights_of_tensors,
)
from diffray.components.kv_pool import KVPool
from diffray.components.mesh import Mesh
from diffray.components.models.fields import Config
from diffray.workers.messages import Change

_TORN = (
    "the last update of the weights was interrupted, so they are of two versions; update them again"
)
_OTHER_RANK = "another rank refused the weights; its log says why"


class Upkeep:
    """Makes an engine's changes; `plan` is its model without storage."""

    def __init__(
        self, model: Updatable, plan: HasParts, config: Config, kv: KVPool, mesh: Mesh
    ) -> None:
        self._model, self._plan, self._config = model, plan, config
        self._kv, self._mesh = kv, mesh
        self.given: dict[int, Mapping[str, Tensor]] = {}  # for changes without a source
        self.unfit = ""  # why no request can run

    def make(self, change: Change) -> str:
        """Make a change while no request is admitted; return why not, with nothing changed."""
        found, refusal = None, ""
        try:
            found = self._checked(change)
        except (ValueError, OSError) as error:
            refusal = str(error)
        if self._mesh.smallest("weights", int(found is not None)) == 0 or found is None:
            return refusal or _OTHER_RANK
        self.unfit = _TORN
        found.copy()
        self._mesh.smallest("copied", 1)  # a collective would not wait as long for the slowest
        self.unfit = ""
        self._kv.forget_prefixes()
        return ""

    def _checked(self, change: Change) -> NewWeights:
        if change.source:
            return weights_of_folder(self._model, self._plan, self._config, change.source)
        found = weights_of_tensors(self._model, self._plan, self.given.pop(change.number))
        if self.unfit and not found.whole:
            raise ValueError(f"{self.unfit}, with all tensors of the model")
        return found
