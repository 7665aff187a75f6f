"""LoRA adapters in PEFT's folders: checked against a model as a whole, then read by rank."""

from collections.abc import Iterator
from pathlib import Path
from typing import Final, NamedTuple

import torch
from torch import Tensor

from diffray.components.backend import free_memory, send
from diffray.components.checkpoints.folder import CheckpointError, read_json
from diffray.components.checkpoints.weights import SafetensorsFile
from diffray.components.denoiser import Denoiser
from diffray.components.layers import Part, Parts, wide
from diffray.components.lora import CONFIG, WEIGHTS, LoRA, PeftConfig
from diffray.components.low_rank import Delta, Deltas, LowRank
from diffray.components.spelling import did_you_mean
from diffray.components.weight import Weight

MAX_RANK: Final = 64
_PREFIX: Final = "base_model.model."
_SIDES: Final = (".lora_A.weight", ".lora_B.weight")
_PARTS: Final = ("attention", "mlp", "experts")  # of a model that can be adapted


class Target(NamedTuple):
    """A module that an adapter changes, and its part of the model."""

    module: str  # as in the model's checkpoint
    part: Part
    scale: float


def _is_adaptable(part: Part) -> bool:
    """Return whether a part is the matrix of a linear layer; fused experts are not."""
    return part.weight is not None and part.weight.part in _PARTS and len(part.shape) == 2


class Adapter:
    """An adapter's folder, in which every tensor was checked against a model's parts."""

    def __init__(self, path: str | Path, parts: Parts, max_rank: int = MAX_RANK) -> None:
        self.path = Path(path)
        if not (self.path / CONFIG).is_file():
            raise CheckpointError(
                f"{self.path} has no {CONFIG}; give the folder of a LoRA adapter, as PEFT saves it"
            )
        if not (self.path / WEIGHTS).is_file():
            raise CheckpointError(f"{self.path} has no {WEIGHTS}; save the adapter as safetensors")
        config = PeftConfig(read_json(self.path / CONFIG), self.path)
        self._file = SafetensorsFile(self.path / WEIGHTS)
        self._names: dict[tuple[str, str], str] = {}  # by module and side
        for name in self._file.tensors:
            self._names[self._place_of(name)] = name
        modules = {module for module, _ in self._names}
        if not modules:
            raise CheckpointError(f"{self.path / WEIGHTS} has no tensors")
        self.targets = [self._target(module, parts, config, max_rank) for module in sorted(modules)]
        for name, part in parts.items():
            module = name.removesuffix(".weight")
            if _is_adaptable(part) and module not in modules and config.wants(module):
                raise CheckpointError(
                    f"{self.path / WEIGHTS} lacks {module}, which target_modules in {CONFIG} "
                    "names; save the adapter whole"
                )

    def _place_of(self, name: str) -> tuple[str, str]:
        plain = name.removeprefix(_PREFIX).replace(".default.weight", ".weight")
        side = next((side for side in _SIDES if plain.endswith(side)), None)
        if side is None:
            raise CheckpointError(
                f"{self.path / WEIGHTS}: {name} is not supported; an adapter has lora_A and lora_B "
                "of linear layers"
            )
        return plain.removesuffix(side), side

    def _target(self, module: str, parts: Parts, config: PeftConfig, max_rank: int) -> Target:
        part = parts.get(f"{module}.weight")
        if part is None:
            modules = [name.removesuffix(".weight") for name in parts if name.endswith(".weight")]
            raise CheckpointError(
                f"{self.path} was trained on another model: it adapts {module}, which this model "
                f"does not have{did_you_mean(module, modules)}"
            )
        if not _is_adaptable(part):
            raise CheckpointError(
                f"{self.path} adapts {module}; only linear layers of attention, MLPs and experts "
                "can be adapted, not routers, embeddings or the head"
            )
        if missing := [side for side in _SIDES if (module, side) not in self._names]:
            raise CheckpointError(f"{self.path / WEIGHTS} lacks {module}{missing[0]}")
        rank = config.rank(module)
        if rank > max_rank:
            raise CheckpointError(
                f"{self.path} has rank {rank}, and max_lora_rank is {max_rank}; raise it"
            )
        rows, columns = part.shape
        for side, expected in zip(_SIDES, ((rank, columns), (rows, rank)), strict=True):
            found = self._file.tensors[self._names[module, side]].shape
            if found != expected:
                raise CheckpointError(
                    f"{self.path / WEIGHTS}: {module}{side} is {list(found)}, and with rank {rank} "
                    f"this model needs {list(expected)}"
                )
        return Target(module, part, config.scale(module))

    def size(self, dtype: torch.dtype) -> int:
        """Return how many bytes this rank's share takes."""
        count = 0
        for module, part, _ in self.targets:
            rank, _ = self._file.tensors[self._names[module, _SIDES[0]]].shape
            count += sum(rank * sum(piece.target.shape) for piece in part.pieces)
        return count * dtype.itemsize

    def deltas(
        self, dtype: torch.dtype, device: torch.device
    ) -> Iterator[tuple[Weight, int, Delta]]:
        """Yield the deltas to this rank's share of each matrix, with the number of its expert."""
        for module, part, scale in self.targets:
            down_RI, up_OR = (self._read(module, side) for side in _SIDES)
            up_OR = up_OR.to(wide(dtype)) * scale
            for piece in part.pieces:
                assert part.weight is not None and isinstance(piece.target, Tensor)
                outputs, inputs = part.weight.stored.shape[-2:]
                expert, start = divmod(piece.target.storage_offset() // inputs, outputs)
                columns = piece.take[1] if len(piece.take) > 1 else slice(None)
                both = down_RI[:, columns], up_OR[piece.take[0]].t()
                down, up = (send(_copied(side, dtype), device) for side in both)
                yield part.weight, expert, Delta(down, up, start)

    def look_through(self) -> None:
        """Read all numbers and refuse NaN and infinite ones."""
        for module, side in self._names:
            self._read(module, side)

    def _read(self, module: str, side: str) -> Tensor:
        name = self._names[module, side]
        tensor = self._file.read(name, (slice(None), slice(None)))
        if not bool(torch.isfinite(tensor).all()):
            raise CheckpointError(f"{self.path / WEIGHTS}: {name} has NaN or infinite values")
        return tensor


def _copied(side: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a copy: a view of the file would change with the file."""
    return side.to(dtype).clone(memory_format=torch.contiguous_format)


def add_adapter(model: Denoiser, plan: Denoiser, adapter: Adapter, lora: LoRA) -> None:
    """Add an adapter to a model; `plan` is the same model without storage, whose parts it has."""
    size, free = adapter.size(model.dtype), free_memory(model.device)
    if size > free:
        raise CheckpointError(f"{adapter.path} takes {size} bytes of memory here; {free} are free")
    names = {module: name for name, module in plan.named_modules()}
    found: list[tuple[Weight, int, Delta]] = []
    for planned, expert, delta in adapter.deltas(model.dtype, model.device):
        weight = model.get_submodule(names[planned])
        assert isinstance(weight, Weight)
        found.append((weight, expert, delta))
    for weight, expert, delta in found:  # now nothing can fail
        if weight.lora is None:
            weight.lora = LowRank(model.running)
        weight.lora.deltas.setdefault(lora, {}).setdefault(expert, Deltas()).append(delta)


def remove_adapter(model: Denoiser, lora: LoRA) -> None:
    """Remove an adapter from a model completely."""
    for weight in model.modules():
        if isinstance(weight, Weight) and weight.lora is not None:
            weight.lora.deltas.pop(lora, None)
            if not weight.lora.deltas:
                weight.lora = None
