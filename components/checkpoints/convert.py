"""Rewrites a mixture-of-experts checkpoint so that each layer's experts are two tensors.

The fused layout loads with a few large reads instead of thousands of small ones. The copy goes
matrix by matrix, with one matrix in memory at a time.
"""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from diffray.components.checkpoints.checkpoint import (
    account,
    check_finite,
    names_in,
    open_checkpoint,
)
from diffray.components.checkpoints.folder import CheckpointError, read_config, resolve
from diffray.components.checkpoints.weights import Stored, WeightFile, open_weights
from diffray.components.checkpoints.writer import Written, new_folder, write_checkpoint
from diffray.components.layers import Index
from diffray.components.mesh import Mesh
from diffray.components.models.fields import Config
from diffray.components.models.registry import choose_build

_SINGLE = re.compile(r"^(.*\.mlp)\.experts\.(\d+)\.(gate|up|down)_proj\.weight$")
_MERGED = re.compile(r"^(.*\.mlp)\.experts\.(gate|up|down)_proj$")
_FUSED = re.compile(r"\.mlp\.w[12]$")
_FUSED_NAMES = {"LLaDAMoEModelLM": "FusedLLaDAMoEModelLM"}


class Source(NamedTuple):
    """A slice of an original tensor."""

    name: str
    take: Index


class Output(NamedTuple):
    """A tensor to write: the concatenation of its sources."""

    name: str
    stored: Stored
    sources: list[Source]

    def written(self, home: dict[str, WeightFile]) -> Written:
        """Return the tensor to write, read from the files that have its sources."""
        return Written(self.name, self.stored, lambda: self._pieces(home))

    def _pieces(self, home: dict[str, WeightFile]) -> Iterator[Tensor]:
        for source in self.sources:
            file = home[source.name]
            read = file.read(*source)
            assert isinstance(read, Tensor)  # quantized checkpoints are refused
            check_finite(read, source.name, file)
            yield read


def convert(
    src: str | Path, dst: str | Path, *, max_shard_bytes: int = 5 * 10**9, progress: bool = True
) -> Path:
    """Write the fused form of `src` to the new folder `dst`, atomically; return `dst`."""
    source, target = resolve(src), new_folder(dst)
    config = read_config(source)
    model = choose_build(config)(config, Mesh(), torch.float32)
    files, stored = open_checkpoint(source, config)
    if stored is not None:
        raise CheckpointError(f"{source} is quantized; convert the checkpoint it was made from")
    names = names_in(files)
    if any(_FUSED.search(name) for name in names):
        raise CheckpointError(f"{source} is already in the fused layout")
    account(model.parts(names), files, source)
    outputs = plan({name: file.tensors[name] for file in files for name in file.tensors}, names)
    if len(outputs) == len(names):
        raise CheckpointError(f"{source} has no experts in separate tensors; use it as it is")

    def check(work: Path) -> None:
        written = open_weights(work)
        account(model.parts(names_in(written)), written, work)

    home = {name: file for file in files for name in file.tensors}
    write_checkpoint(
        source,
        target,
        [output.written(home) for output in outputs],
        _fused_config(config),
        check,
        max_shard_bytes=max_shard_bytes,
        progress=progress,
    )
    return target


def _fused_config(config: Config) -> Config:
    # auto_map names code that reads the original layout; it is not copied.
    fused = {key: value for key, value in config.items() if key != "auto_map"}
    architectures = config.get("architectures")
    if isinstance(architectures, list):
        fused["architectures"] = [_FUSED_NAMES.get(name, name) for name in architectures]
    return fused


def plan(stored: dict[str, Stored], names: set[str]) -> list[Output]:
    """Return what to write: experts' matrices joined, everything else as it is."""
    outputs: list[Output] = []
    # layer's mlp -> (expert, projection) -> where it is
    experts: dict[str, dict[tuple[int, str], Source]] = {}
    for name in sorted(names):
        if match := _SINGLE.match(name):
            mlp, expert, projection = match.groups()
            experts.setdefault(mlp, {})[int(expert), projection] = Source(name, ())
        elif match := _MERGED.match(name):
            mlp, projection = match.groups()
            for number in range(stored[name].shape[0]):
                part = Source(name, (slice(number, number + 1),))
                experts.setdefault(mlp, {})[number, projection] = part
        else:
            outputs.append(Output(name, stored[name], [Source(name, ())]))
    for mlp, sources in experts.items():
        dtypes = {stored[source.name].dtype for source in sources.values()}
        if len(dtypes) > 1:
            raise CheckpointError(f"the experts of {mlp} are of several dtypes: {sorted(dtypes)}")
        count = len(sources) // 3
        width, hidden = stored[sources[0, "gate"].name].shape[-2:]
        rows = [sources[e, p] for e in range(count) for p in ("gate", "up")]
        downs = [sources[e, "down"] for e in range(count)]
        dtype = dtypes.pop()
        outputs.append(Output(f"{mlp}.w1", Stored((count, 2 * width, hidden), dtype), rows))
        outputs.append(Output(f"{mlp}.w2", Stored((count, hidden, width), dtype), downs))
    return sorted(outputs, key=_by_layer)


def _by_layer(output: Output) -> list[tuple[int, str]]:
    """Order layer 2 before layer 10."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in output.name.split(".")]
