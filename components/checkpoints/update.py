"""New weights for a loaded model: all of them are checked before the first byte changes.

They are copied into the existing parameters, so recorded graphs that read those stay valid.
"""

from collections.abc import Collection, Iterator, Mapping
from collections.abc import Sequence as Items
from pathlib import Path
from typing import Protocol, Self

import torch
from torch import Tensor

from diffray.components.backend import DTYPES
from diffray.components.checkpoints.checkpoint import (
    account,
    differences,
    fill,
    look_through,
    names_in,
    open_checkpoint,
)
from diffray.components.checkpoints.folder import (
    DRAFTER,
    CheckpointError,
    listed,
    read_config,
    resolve,
)
from diffray.components.checkpoints.weights import FLOATS, Stored, WeightFile
from diffray.components.layers import Index, Parts
from diffray.components.mesh import Mesh
from diffray.components.models.fields import Config
from diffray.components.models.registry import build_model, choose_build

# A checkpoint's folder or Hub id, or tensors by the names of the checkpoint.
Source = str | Path | Mapping[str, Tensor]


class HasParts(Protocol):
    """A model that says where each tensor of a checkpoint goes, with or without storage."""

    def parts(self, names: Collection[str]) -> Parts: ...


class Updatable(HasParts, Protocol):
    """A loaded model whose weights can be replaced."""

    @property
    def dtype(self) -> torch.dtype: ...

    def pack(self) -> None: ...

    def unpack(self) -> bool: ...


class GivenTensors:
    """Tensors of this process, read like those of a file."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self.path = Path("the state dict")
        self._given = dict(tensors)
        for name, tensor in self._given.items():
            if not isinstance(tensor, Tensor):
                raise CheckpointError(f"{name} is {type(tensor).__name__}; give a torch.Tensor")
        known = {dtype: name for name, dtype in FLOATS.items()}
        self.tensors = {
            name: Stored(tuple(tensor.shape), known.get(tensor.dtype, str(tensor.dtype)))
            for name, tensor in self._given.items()
        }

    def read(self, name: str, index: Index) -> Tensor:
        return self._given[name].detach()[index]


class NewWeights:
    """Weights that fit a model; `copy` replaces its own by them.

    `plan` is the same model without storage: the loaded one may have another layout.
    """

    def __init__(self, model: Updatable, plan: HasParts, files: Items[WeightFile]) -> None:
        self._model, self._files, self._names = model, files, names_in(files)
        self._parts = plan.parts(self._names)
        needed = {name for name, part in self._parts.items() if not part.optional}
        self.whole = needed <= self._names

    def looked_through(self) -> Self:
        """Read all numbers and refuse NaN and infinite ones; return the same weights."""
        look_through(self._parts, self._files, self._model.dtype)
        return self

    @torch.no_grad()
    def copy(self) -> None:
        """Copy them into the model's parameters, in place."""
        packed = self._model.unpack()
        try:
            parts = self._model.parts(self._names)
            chosen = {n: part for n, part in parts.items() if self.whole or n in self._names}
            fill(chosen, self._files, progress=False)
        finally:
            if packed:
                self._model.pack()


def check_folder(model: Path, dtype: str, source: str) -> None:
    """Refuse a folder whose weights do not fit a model; read them once, not once per rank.

    `model` is the folder of the model's checkpoint, `dtype` the name of its dtype or "auto".
    """
    config = read_config(model)
    plan = build_model(config, Mesh(), DTYPES.get(dtype, torch.float32))
    weights_of_folder(plan, plan, config, source)


def weights_of_folder(
    model: Updatable, plan: HasParts, config: Config, source: str | Path
) -> NewWeights:
    """Check a folder or Hub id; `config` is that of the model's own checkpoint."""
    path = resolve(source)
    new = read_config(path)
    config, new = _without_drafter(config), _without_drafter(new)  # the first one stays
    if found := _changed_fields(config, new):
        raise CheckpointError(
            f"{path} is a checkpoint of another model: config.json differs in {listed(found)}"
        )
    files, stored = open_checkpoint(path, new)
    if stored is not None:
        raise CheckpointError(
            f"{path} is quantized; give unquantized weights, which are quantized here"
        )
    account(plan.parts(names_in(files)), files, path)
    return NewWeights(model, plan, files).looked_through()


def _without_drafter(config: Config) -> Config:
    return {key: value for key, value in config.items() if key != DRAFTER}


def first_weights(model: Updatable, plan: HasParts, config: Config, path: Path) -> NewWeights:
    """Return the weights that a model was loaded with, from the same folder."""
    files, _ = open_checkpoint(path, config)
    account(plan.parts(names_in(files)), files, path)
    return NewWeights(model, plan, files)


def weights_of_tensors(
    model: Updatable, plan: HasParts, tensors: Mapping[str, Tensor]
) -> NewWeights:
    """Check a state dict, which may have only some of the model's tensors."""
    files = [GivenTensors(tensors)]
    names = names_in(files)
    if not names:
        raise CheckpointError("the state dict names no tensor; give the tensors to replace")
    named = {name: part for name, part in plan.parts(names).items() if name in names}
    if complaints := differences(named, files):
        raise CheckpointError(
            f"the given tensors are not those of the model, by its checkpoint's names: {complaints}"
        )
    return NewWeights(model, plan, files).looked_through()


class _Noted(Mapping[str, object]):
    """A config that records which of its keys are read."""

    def __init__(self, config: Config) -> None:
        self._config = config
        self.read: set[str] = set()

    def __getitem__(self, key: str) -> object:
        self.read.add(key)
        return self._config[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._config)

    def __len__(self) -> int:
        return len(self._config)


def _changed_fields(old: Config, new: Config) -> list[str]:
    """Return the fields that differ, among those that a model is built from."""
    if choose_build(old) is not choose_build(new):
        return ["architectures"]
    notes = [_Noted(old), _Noted(new)]
    for noted in notes:
        choose_build(noted)(noted, Mesh(), torch.float32)
    names = (notes[0].read | notes[1].read) - {"architectures", "model_type"}
    return sorted(name for name in names if old.get(name) != new.get(name))
