"""The LoRA adapters of an engine, each loaded when a request that names it arrives."""

import logging
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final

import torch

from diffray.components.checkpoints.folder import drafter_of, pinned, read_config, resolve
from diffray.components.checkpoints.lora import MAX_RANK, Adapter, add_adapter, remove_adapter
from diffray.components.config import InvalidField
from diffray.components.denoiser import Denoiser
from diffray.components.layers import Parts
from diffray.components.lora import CONFIG, WEIGHTS, LoRA
from diffray.components.mesh import Mesh
from diffray.components.models.registry import build_model
from diffray.components.sequence import Sequence
from diffray.components.spelling import did_you_mean
from diffray.workers.messages import Request

log = logging.getLogger(__name__)

ANY_RANK: Final = 1 << 16


class Adapters:
    """The adapters of one rank; the most recently used stay loaded while no request uses them.

    A request carries its adapter's path, so ranks that were replaced load it again. All ranks load
    an adapter at the same time, or none does.
    """

    def __init__(
        self, model: Denoiser, plan: Denoiser, mesh: Mesh, most: int, max_rank: int
    ) -> None:
        self._model, self._plan, self._mesh = model, plan, mesh
        self._most, self._max_rank = most, max_rank
        self._loaded: dict[LoRA, None] = {}  # least recently used first
        self._drafter: LoRA | None = None  # the checkpoint's own, which stays whatever its rank

    def enter(self, lora: LoRA, others: Iterable[Sequence]) -> None:
        """Load a request's adapter; `others` are the engine's sequences, whose adapters stay."""
        if lora not in self._loaded:
            self._load(lora)
        self._loaded.pop(lora, None)
        self._loaded[lora] = None
        used = {sequence.lora for sequence in others} | {lora, self._drafter}
        unused = [each for each in self._loaded if each not in used]
        count = len(self._loaded) - (self._drafter in self._loaded)
        for each in unused[: max(count - self._most, 0)]:
            remove_adapter(self._model, each)
            del self._loaded[each]

    def enter_drafter(self, checkpoint: Path) -> LoRA | None:
        """Load the adapter that comes with a checkpoint, if one does on all ranks."""
        drafter = drafter_of(checkpoint)
        if not self._mesh.smallest("drafter", int(drafter is not None)) or drafter is None:
            return None
        Adapter(drafter, self._plan.parts(()), ANY_RANK)  # says what is wrong with it
        self._drafter = LoRA(drafter.name, str(drafter), 0)
        self.enter(self._drafter, ())
        return self._drafter

    def forget(self) -> None:
        """Unload all adapters; requests that name them load them again."""
        for lora in self._loaded:
            remove_adapter(self._model, lora)
        self._loaded.clear()

    def _load(self, lora: LoRA) -> None:
        is_loaded = False
        try:
            most = ANY_RANK if lora == self._drafter else self._max_rank
            adapter = Adapter(resolve(lora.path), self._plan.parts(()), most)
            add_adapter(self._model, self._plan, adapter, lora)
            is_loaded = True
        except Exception:  # on any error, or the other ranks would wait for this one
            log.exception("the adapter %s of %s could not be loaded", lora.name, lora.path)
        if self._mesh.smallest("adapter", int(is_loaded)) == 0:
            remove_adapter(self._model, lora)
            raise ValueError(
                f"the adapter {lora.name!r} could not be loaded, the engine's log says why; unload "
                "it and load it again"
            )


@dataclass(slots=True)
class LoadedAdapters:
    """The adapters that requests may name, checked against a model whose weights are not needed."""

    model: str | None = None  # its folder or Hub id; None: no adapter can be loaded
    max_rank: int = MAX_RANK
    reserved: Collection[str] = ()  # the model's own names
    _by_name: dict[str, LoRA] = field(default_factory=dict)
    _parts: Parts = field(default_factory=dict)

    @staticmethod
    def of(
        model: str, given: Mapping[str, str], max_rank: int, reserved: Collection[str] = ()
    ) -> "LoadedAdapters":
        loaded = LoadedAdapters(model, max_rank, reserved)
        for name, path in given.items():
            loaded.load(name, path)
        return loaded

    @property
    def names(self) -> Collection[str]:
        return self._by_name.keys()

    @property
    def all(self) -> tuple[LoRA, ...]:
        return tuple(self._by_name.values())

    def load(self, name: str, path: str | Path) -> LoRA:
        """Register an adapter; raise ValueError if it does not fit the model."""
        where = pinned(path)
        if self.has(name, where):
            return self._by_name[name]
        self.check_name(name)
        self.check(where)
        self._by_name[name] = LoRA.loaded_now(name, where)
        return self._by_name[name]

    def has(self, name: str, where: str) -> bool:
        """Return whether this adapter is known and its files have not changed since."""
        known = self._by_name.get(name)
        if known is None or known.path != where:
            return False
        if not (folder := Path(where)).is_dir():
            return True  # a commit, which never changes
        files = [file for part in (CONFIG, WEIGHTS) if (file := folder / part).is_file()]
        return len(files) == 2 and max(f.stat().st_ctime_ns for f in files) < known.number

    def check_name(self, name: str) -> None:
        if not name or name in self.reserved:
            raise InvalidField(f"{name!r} cannot be an adapter's name; choose another", "lora_name")
        if name in self._by_name:
            raise InvalidField(f"an adapter {name!r} is loaded; unload it first", "lora_name")

    def check(self, path: str | Path) -> None:
        """Raise ValueError if an adapter does not fit the model, or has NaN or infinite numbers."""
        if self.model is None:
            raise ValueError("this engine takes no adapters")
        folder = resolve(path)
        if not self._parts:
            config = read_config(resolve(self.model))
            self._parts = build_model(config, Mesh(), torch.float32).parts(())
        Adapter(folder, self._parts, self.max_rank).look_through()

    def replace(self, loras: Iterable[LoRA]) -> None:
        """Replace the known adapters by these, which were checked elsewhere."""
        self._by_name = {lora.name: lora for lora in loras}

    def unload(self, name: str) -> None:
        """Forget an adapter; requests that already use it continue."""
        self.find(name, "lora_name")
        del self._by_name[name]

    def given_to(self, request: Request, model: str | None = None) -> Request:
        """Return a request with the adapter that its model name or its parameters name."""
        name = model if model in self._by_name else request.params.lora
        if not name:
            return request
        return replace(request, lora=self.find(name))

    def find(self, name: str, field: str = "lora") -> LoRA:
        if name not in self._by_name:
            near = did_you_mean(name, self._by_name)
            known = f"Loaded: {', '.join(self._by_name)}" if self._by_name else "Load it first"
            raise InvalidField(f"no adapter {name!r} is loaded{near or '.'} {known}", field)
        return self._by_name[name]
