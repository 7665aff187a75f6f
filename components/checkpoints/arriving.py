"""A checkpoint that arrives in parts, each a file; the folder appears when all are there.

It is written by one rank of an engine; the others only count what has arrived.
"""

import json
import re
import shutil
import tempfile
from collections.abc import Collection, Iterator
from collections.abc import Sequence as Items
from pathlib import Path
from typing import Final

import torch
from torch import Tensor

from diffray.components.checkpoints.checkpoint import differences
from diffray.components.checkpoints.folder import CheckpointError, listed
from diffray.components.checkpoints.update import HasParts
from diffray.components.checkpoints.weights import FLOATS, Stored
from diffray.components.checkpoints.writer import Written, as_bytes, header
from diffray.components.models.fields import Config

_KEPT: Final = 2  # newest folders: another replica may still load the one before the last
_OWN: Final = re.compile(r"received-(\d+)")
# Dropped: tensors arrive plain, and the first drafter stays.
_DROPPED: Final = ("quantization_config", "compression_config", "drafter")
_DTYPES: Final = {str(dtype).removeprefix("torch."): name for name, dtype in FLOATS.items()}


class Announced:
    """Announced tensors, described like those of a file."""

    def __init__(self, tensors: dict[str, Stored]) -> None:
        self.tensors = tensors

    @classmethod
    def of(cls, names: Items[str], dtypes: Items[str], shapes: Items[Items[int]]) -> "Announced":
        if not names or not len(names) == len(dtypes) == len(shapes):
            raise CheckpointError(
                f"{len(names)} names, {len(dtypes)} dtypes and {len(shapes)} shapes; give one of "
                "each for each tensor"
            )
        described = zip(dtypes, shapes, strict=True)
        stored = [Stored(tuple(shape), _DTYPES.get(dtype, dtype)) for dtype, shape in described]
        tensors = dict(zip(names, stored, strict=True))
        if len(tensors) < len(names):
            twice = sorted(name for name in tensors if names.count(name) > 1)
            raise CheckpointError(f"named twice: {listed(twice)}")
        return cls(tensors)


class ArrivingCheckpoint:
    """New weights that arrive in `root`, of the model whose parts `plan` knows."""

    def __init__(self, root: Path, plan: HasParts, config: Config) -> None:
        self._root, self._plan, self._config = root, plan, config
        self._home: dict[str, str] = {}  # tensor -> its file
        self._work: Path | None = None

    def check(self, coming: Announced) -> None:
        """Refuse tensors that are not the model's, or that have already arrived."""
        names = {*self._home, *coming.tensors}
        parts = self._plan.parts(names)
        named = {name: part for name, part in parts.items() if name in coming.tensors}
        if complaints := differences(named, [coming]):
            raise CheckpointError(
                "the announced tensors are not those of the model, by its checkpoint's names: "
                f"{complaints}"
            )
        if again := sorted(coming.tensors.keys() & self._home.keys()):
            raise CheckpointError(
                f"arrived before, while others are missing: {listed(again)}; send each tensor once"
            )

    def arrive(self, coming: Announced, tensors: Iterator[Tensor], *, write: bool) -> None:
        """Receive the tensors, in order; write them to a file if `write` is set."""
        file = f"model-{len(set(self._home.values())) + 1:05}.safetensors"
        if not write:
            for _ in tensors:
                pass
        else:
            if self._work is None:
                self._root.mkdir(parents=True, exist_ok=True)
                self._work = Path(tempfile.mkdtemp(prefix=".receiving-", dir=self._root))
            shard = [Written(name, stored, tuple) for name, stored in coming.tensors.items()]
            with (self._work / file).open("wb") as out:
                out.write(header(shard))
                for tensor in tensors:
                    out.write(as_bytes(tensor))
        self._home |= dict.fromkeys(coming.tensors, file)

    @property
    def missing(self) -> int:
        """How many of the model's tensors have not arrived."""
        parts = self._plan.parts(self._home.keys())
        needed = {name for name, part in parts.items() if not part.optional}
        return len(needed - self._home.keys())

    def place(self, number: int) -> Path:
        """Return the folder that the weights of this number go to."""
        return self._root / f"received-{number}"

    def finish(self, number: int, used: Collection[str]) -> None:
        """Publish the folder, and remove older ones that are not `used`."""
        assert self._work is not None, "another rank writes"
        index = {"metadata": {}, "weight_map": self._home}
        (self._work / "model.safetensors.index.json").write_text(json.dumps(index))
        plain = {key: value for key, value in self._config.items() if key not in _DROPPED}
        (self._work / "config.json").write_text(json.dumps(plain))
        self._work.chmod(self._root.stat().st_mode & 0o777)
        target = self.place(number)
        try:
            self._work.rename(target)
        except OSError:  # another replica on this machine was faster
            if not target.is_dir():
                raise
            self.forget()
        self._work = None
        found = {int(match[1]) for each in self._root.iterdir() if (match := _own(each))}
        for old in sorted(found)[:-_KEPT]:
            if str(self.place(old)) not in used:
                shutil.rmtree(self.place(old), ignore_errors=True)

    def next(self) -> "ArrivingCheckpoint":
        """Return the next checkpoint, of which nothing has arrived."""
        return ArrivingCheckpoint(self._root, self._plan, self._config)

    def forget(self) -> None:
        """Remove what has arrived."""
        if self._work is not None:
            shutil.rmtree(self._work, ignore_errors=True)
        self._work, self._home = None, {}


def _own(folder: Path) -> re.Match[str] | None:
    return _OWN.fullmatch(folder.name)


def dtype_of(stored: Stored) -> torch.dtype:
    return FLOATS[stored.dtype]
