"""The tiles of each kernel and shape: measured once on a GPU, stored on disk, then looked up.

A kernel names its default tile and the alternatives worth trying. An engine only looks tiles up;
measuring programs let the tuner try them, which fills the file.
"""

import json
import os
import re
import tempfile
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Items
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import torch
import triton
from triton.runtime.errors import OutOfResources


class Tile(NamedTuple):
    """How a program tiles its matrices and is launched; all zeros stand for another program."""

    rows: int
    columns: int
    depth: int
    warps: int
    stages: int


Shape = tuple[int | str, ...]
Seconds = Callable[[Callable[[], object]], float]


class Tuner:
    """The known tiles for one GPU type and one version of Triton."""

    def __init__(self, path: Path | None = None, gpu: str = "") -> None:
        self._path, self._gpu = path, gpu
        self._seconds: Seconds | None = None
        self._tiles = self._read()
        self._picked: dict[Shape, Tile] = {}  # recent lookups, to skip building a key

    @staticmethod
    def of_device(device: torch.device) -> "Tuner":
        """Return the tuner of this GPU; without a GPU, an empty one."""
        if device.type != "cuda":
            return Tuner()
        gpu = torch.cuda.get_device_name(device)
        return Tuner(cache_folder() / file_name(gpu), gpu)

    def pick(
        self,
        kernel: str,
        shape: Shape,
        default: Tile,
        others: Callable[[], Items[Tile]],
        run: Callable[[Tile], object],
    ) -> Tile:
        """Return the known tile for a kernel and a shape, else the default.

        While `measuring`, unknown tiles are measured first, with `run`.
        """
        asked = kernel, *shape
        if self._seconds is None and asked in self._picked:
            return self._picked[asked]
        key = "/".join(map(str, asked))
        tiles = [default, *others()]
        tile = self._tiles.get(key)
        if tile not in tiles:  # not measured, or measured with other alternatives
            tile = default
            if self._seconds is not None:
                tile = self._tiles[key] = self._fastest(tiles, run, self._seconds)
                self._write()
        self._picked[asked] = tile
        return tile

    @contextmanager
    def measuring(self, seconds: Seconds | None = None) -> Iterator[None]:
        """Try tiles for every shape inside the block; not during graph capture."""
        self._seconds = seconds or _median_seconds
        try:
            yield
        finally:
            self._seconds = None

    def _fastest(self, tiles: Items[Tile], run: Callable[[Tile], object], seconds: Seconds) -> Tile:
        times: dict[Tile, float] = {}
        for tile in tiles:
            try:
                times[tile] = seconds(lambda tile=tile: run(tile))  # type: ignore[misc]
            except OutOfResources:  # not enough shared memory
                continue
        return min(times, key=times.__getitem__, default=tiles[0])

    def _read(self) -> dict[str, Tile]:
        """Return the file's tiles; none if it is missing, damaged, or for something else."""
        if self._path is None:
            return {}
        try:
            found = json.loads(self._path.read_text())
            if found["gpu"] != self._gpu or found["triton"] != triton.__version__:
                return {}
            return {str(key): _tile(values) for key, values in found["tiles"].items()}
        except (OSError, ValueError, TypeError, KeyError, AttributeError):
            return {}

    def _write(self) -> None:
        """Add to the file atomically: other processes may read it or add to it."""
        if self._path is None:
            return
        self._tiles = self._read() | self._tiles
        tiles = {key: list(tile) for key, tile in sorted(self._tiles.items())}
        content = {"gpu": self._gpu, "triton": triton.__version__, "tiles": tiles}
        self._path.parent.mkdir(parents=True, exist_ok=True)
        number, name = tempfile.mkstemp(dir=self._path.parent, prefix=self._path.name)
        with os.fdopen(number, "w") as file:
            file.write(json.dumps(content, indent=1) + "\n")
        os.replace(name, self._path)


def cache_folder() -> Path:
    """Return the folder for tiles in the user's cache."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "diffray/tiles"


def file_name(gpu: str) -> str:
    """Return the file name for a GPU and this version of Triton."""
    plain = re.sub(r"[^A-Za-z0-9.]+", "-", f"{gpu} triton {triton.__version__}")
    return f"{plain.strip('-').lower()}.json"


def _tile(values: object) -> Tile:
    if (
        not isinstance(values, list)
        or len(values) != len(Tile._fields)
        or any(type(value) is not int for value in values)
    ):
        raise ValueError(f"{values!r} is no tile")
    return Tile(*values)


def _median_seconds(run: Callable[[], object]) -> float:
    return float(triton.testing.do_bench(run, return_mode="median")) / 1e3


UNTUNED = Tuner()
