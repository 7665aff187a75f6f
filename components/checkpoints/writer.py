"""Writes a checkpoint: tensors one after the other, and the files beside them.

The folder is built beside its place and renamed at the end, so it is never half-written.
"""

import json
import shutil
import struct
import tempfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from diffray.components.checkpoints.folder import DRAFTER, CheckpointError, drafter_of
from diffray.components.checkpoints.gguf_folder import LINK
from diffray.components.checkpoints.weights import FLOATS, WHOLE, Stored
from diffray.components.lora import CONFIG, WEIGHTS
from diffray.components.models.fields import Config

_SIDE_FILES = {".json", ".jinja", ".model", ".txt", ".md"}


class Written(NamedTuple):
    """A tensor to write; its rows are produced in pieces while they are written."""

    name: str
    stored: Stored
    pieces: Callable[[], Iterable[Tensor]]

    @property
    def num_bytes(self) -> int:
        return self.stored.numel * (FLOATS | WHOLE)[self.stored.dtype].itemsize


def new_folder(dst: str | Path) -> Path:
    """Return the folder to write; refuse one that is not empty."""
    target = Path(dst).expanduser().absolute()
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise CheckpointError(f"{target} exists and is not empty; name a new folder")
    return target


def write_checkpoint(
    source: Path,
    target: Path,
    outputs: list[Written],
    config: Config,
    check: Callable[[Path], None],
    *,
    max_shard_bytes: int = 5 * 10**9,
    progress: bool = True,
) -> None:
    """Write the tensors, a config and the other files of the source; `check` the result."""
    total = sum(output.num_bytes for output in outputs)
    target.parent.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(target.parent).free
    if free < total:
        raise CheckpointError(f"{target.parent} has {free} free bytes; {total} are needed")
    work = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.parent))
    try:
        _write_weights(work, outputs, max_shard_bytes, progress)
        _write_side_files(work, source, config)
        check(work)
        work.chmod(target.parent.stat().st_mode & 0o777)
        work.replace(target)
    except BaseException:
        shutil.rmtree(work, ignore_errors=True)
        raise


def _write_weights(work: Path, outputs: list[Written], limit: int, progress: bool) -> None:
    from tqdm import tqdm

    shards = list(_shards(outputs, limit))
    total = sum(output.num_bytes for output in outputs)
    weight_map: dict[str, str] = {}
    hidden = None if progress else True  # None: shown only on a terminal
    with tqdm(total=total, desc="write", unit="B", unit_scale=True, disable=hidden) as bar:
        for number, shard in enumerate(shards, 1):
            name = f"model-{number:05}-of-{len(shards):05}.safetensors"
            weight_map |= dict.fromkeys((output.name for output in shard), name)
            with (work / name).open("wb") as out:
                out.write(header(shard))
                for output in shard:
                    for piece in output.pieces():
                        bar.update(out.write(as_bytes(piece)))
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (work / "model.safetensors.index.json").write_text(json.dumps(index, indent=1) + "\n")


def _shards(outputs: list[Written], limit: int) -> Iterator[list[Written]]:
    shard: list[Written] = []
    size = 0
    for output in outputs:
        if shard and size + output.num_bytes > limit:
            yield shard
            shard, size = [], 0
        shard.append(output)
        size += output.num_bytes
    yield shard


def header(shard: list[Written]) -> bytes:
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


def as_bytes(tensor: Tensor) -> memoryview:
    return tensor.contiguous().flatten().view(torch.uint8).numpy().data


def _write_side_files(work: Path, source: Path, config: Config) -> None:
    """Write config.json and copy the tokenizer and the other files beside the weights."""
    own = {key: value for key, value in config.items() if key != DRAFTER}
    (work / "config.json").write_text(json.dumps(own, indent=2, ensure_ascii=False) + "\n")
    for file in sorted(source.iterdir()):
        replaced = file.name == "config.json" or file.name.endswith(".index.json")
        is_side = file.suffix in _SIDE_FILES or file.name.startswith("LICENSE")
        if is_side and not replaced and file.is_file():
            _refuse_foreign(file, source)
            shutil.copyfile(file, work / file.name)
    if (drafter := drafter_of(source)) is not None:
        (work / drafter.name).mkdir()
        # That of a GGUF file is linked by this project itself.
        source = drafter.resolve() if (source / LINK).exists() else source
        for file in (drafter / CONFIG, drafter / WEIGHTS):
            _refuse_foreign(file, source)
            shutil.copyfile(file, work / drafter.name / file.name)


def _refuse_foreign(file: Path, source: Path) -> None:
    """Refuse a link that leads out of its checkpoint: a copy would expose its target.

    The Hugging Face cache links snapshots/REVISION/NAME to blobs/HASH.
    """
    folder, place = source.resolve(), file.resolve()
    own = (folder, folder.parent.parent / "blobs")
    if not any(place.is_relative_to(each) for each in own):
        raise CheckpointError(
            f"{file} is a link to {place}, outside of the checkpoint; replace it by the file itself"
        )
