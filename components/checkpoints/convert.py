"""Rewrites a mixture-of-experts checkpoint so that each layer's experts are two tensors.

The fused layout loads with a few large reads instead of thousands of small ones. The copy goes
matrix by matrix, with one matrix in memory at a time.
"""

import json
import re
import shutil
import struct
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from diffray.components.checkpoints.checkpoint import account, names_in, read_config, resolve
from diffray.components.checkpoints.weights import (
    FLOATS,
    CheckpointError,
    Stored,
    WeightFile,
    open_weights,
)
from diffray.components.layers import Index
from diffray.components.mesh import Mesh
from diffray.components.models.fields import Config
from diffray.components.models.registry import choose_build

_SINGLE = re.compile(r"^(.*\.mlp)\.experts\.(\d+)\.(gate|up|down)_proj\.weight$")
_MERGED = re.compile(r"^(.*\.mlp)\.experts\.(gate|up|down)_proj$")
_FUSED = re.compile(r"\.mlp\.w[12]$")
_SIDE_FILES = {".json", ".jinja", ".model", ".txt", ".md"}
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

    @property
    def num_bytes(self) -> int:
        return self.stored.numel * FLOATS[self.stored.dtype].itemsize


def convert(
    src: str | Path, dst: str | Path, *, max_shard_bytes: int = 5 * 10**9, progress: bool = True
) -> Path:
    """Write the fused form of `src` to the new folder `dst`, atomically; return `dst`."""
    source, target = resolve(src), Path(dst).expanduser().absolute()
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise CheckpointError(f"{target} exists and is not empty; name a new folder")
    config = read_config(source)
    model = choose_build(config)(config, Mesh(), torch.float32)
    files = open_weights(source)
    names = names_in(files)
    if any(_FUSED.search(name) for name in names):
        raise CheckpointError(f"{source} is already in the fused layout")
    account(model.parts(names), files, source)
    outputs = plan({name: file.tensors[name] for file in files for name in file.tensors}, names)
    if len(outputs) == len(names):
        raise CheckpointError(f"{source} has no experts, so there is nothing to fuse")
    total = sum(output.num_bytes for output in outputs)
    target.parent.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(target.parent).free
    if free < total:
        raise CheckpointError(f"{target.parent} has {free} free bytes; {total} are needed")

    # Built beside the target and renamed at the end, so `dst` is never half-written.
    work = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.parent))
    try:
        _write_weights(work, outputs, files, max_shard_bytes, progress)
        _write_side_files(work, source, config)
        written = open_weights(work)
        account(model.parts(names_in(written)), written, work)
        work.chmod(target.parent.stat().st_mode & 0o777)
        work.replace(target)
    except BaseException:
        shutil.rmtree(work, ignore_errors=True)
        raise
    return target


def plan(stored: dict[str, Stored], names: set[str]) -> list[Output]:
    """Return what to write: experts' matrices joined, everything else as it is."""
    outputs: list[Output] = []
    # (layer's mlp, expert, projection) -> where it is
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


def _write_weights(
    work: Path, outputs: list[Output], files: list[WeightFile], limit: int, progress: bool
) -> None:
    from tqdm import tqdm

    home = {name: file for file in files for name in file.tensors}
    shards = list(_shards(outputs, limit))
    total = sum(output.num_bytes for output in outputs)
    weight_map: dict[str, str] = {}
    hidden = None if progress else True  # None: shown only on a terminal
    with tqdm(total=total, desc="convert", unit="B", unit_scale=True, disable=hidden) as bar:
        for number, shard in enumerate(shards, 1):
            name = f"model-{number:05}-of-{len(shards):05}.safetensors"
            weight_map |= dict.fromkeys((output.name for output in shard), name)
            with (work / name).open("wb") as out:
                out.write(_header(shard))
                for source in (source for output in shard for source in output.sources):
                    bar.update(out.write(_bytes(home[source.name].read(*source))))
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (work / "model.safetensors.index.json").write_text(json.dumps(index, indent=1) + "\n")


def _shards(outputs: list[Output], limit: int) -> Iterator[list[Output]]:
    shard: list[Output] = []
    size = 0
    for output in outputs:
        if shard and size + output.num_bytes > limit:
            yield shard
            shard, size = [], 0
        shard.append(output)
        size += output.num_bytes
    yield shard


def _header(shard: list[Output]) -> bytes:
    """Return the header of a safetensors file: a length, and JSON with the offsets."""
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for output in shard:
        end = offset + output.num_bytes
        shape, dtype = output.stored
        entries[output.name] = {"dtype": dtype, "shape": shape, "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text


def _bytes(tensor: Tensor) -> memoryview:
    return tensor.contiguous().flatten().view(torch.uint8).numpy().data


def _write_side_files(work: Path, source: Path, config: Config) -> None:
    """Write config.json and copy the tokenizer and the other files beside the weights."""
    # auto_map names code that reads the original layout; it is not copied.
    fused = {key: value for key, value in config.items() if key != "auto_map"}
    architectures = config.get("architectures")
    if isinstance(architectures, list):
        fused["architectures"] = [_FUSED_NAMES.get(name, name) for name in architectures]
    (work / "config.json").write_text(json.dumps(fused, indent=2, ensure_ascii=False) + "\n")
    for file in sorted(source.iterdir()):
        replaced = file.name == "config.json" or file.name.endswith(".index.json")
        is_side = file.suffix in _SIDE_FILES or file.name.startswith("LICENSE")
        if is_side and not replaced and file.is_file():
            _refuse_foreign(file)
            shutil.copyfile(file, work / file.name)


def _refuse_foreign(file: Path) -> None:
    """Refuse a link that leads out of its checkpoint: a copy would expose its target.

    The Hugging Face cache links snapshots/REVISION/NAME to blobs/HASH.
    """
    folder, place = file.parent.resolve(), file.resolve()
    own = (folder, folder.parent.parent / "blobs")
    if not any(place.is_relative_to(each) for each in own):
        raise CheckpointError(
            f"{file} is a link to {place}, outside of the checkpoint; replace it by the file itself"
        )
