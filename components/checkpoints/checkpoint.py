"""Loads a model's shard from a checkpoint on disk or on the Hub.

All tensors are checked before the first is read; then each is copied straight into place.
"""

import re
from collections.abc import Iterator, Set
from collections.abc import Sequence as Items
from pathlib import Path

import torch
from torch import Tensor

from diffray.components.backend import (
    check_formats,
    choose_device,
    choose_dtype,
    choose_quantization,
    send,
)
from diffray.components.checkpoints.folder import (
    CheckpointError,
    listed,
    read_config,
    resolve,
)
from diffray.components.checkpoints.gguf import read_gguf
from diffray.components.checkpoints.gguf_folder import LINK
from diffray.components.checkpoints.gguf_weights import GGUFFile
from diffray.components.checkpoints.quantized import QuantizedFile, read_layout
from diffray.components.checkpoints.recommended import with_recommended
from diffray.components.checkpoints.weights import (
    FLOATS,
    HasTensors,
    Stored,
    WeightFile,
    open_weights,
)
from diffray.components.denoiser import Denoiser
from diffray.components.layers import Part, Parts, Piece
from diffray.components.mesh import Mesh
from diffray.components.models.fields import Config
from diffray.components.models.registry import build_model, kernels_for
from diffray.components.quantization import Given, Scheme
from diffray.kernels.quantize import quantize

# Buffers that some checkpoints contain and that are computed here.
_COMPUTED = re.compile(r"(^|\.)rotary_emb\.(inv_freq|original_inv_freq)$")
_BAND = 32 << 20  # bytes
_QUANTIZED_BAND = 128 << 10


def load_model(
    path_or_hub_id: str | Path,
    *,
    dtype: str = "auto",
    device: str = "auto",
    mesh: Mesh | None = None,
    progress: bool = True,
    kernels: str = "auto",
    refused: Set[str] = frozenset(),
    quantization: Given | None = None,
) -> Denoiser:
    """Return the model with this rank's weights; reads only this rank's share.

    Tensors are quantized as they are read, a few rows at a time.
    """
    place = choose_device(device)
    number = choose_dtype(dtype, place)
    requested = choose_quantization(quantization, place)
    path = resolve(path_or_hub_id)
    config = read_config(path)
    chosen = kernels_for(config, kernels, place, number, refused)
    model = build_model(config, mesh or Mesh(), number, chosen)
    files, scheme = prepare(model, path, config, requested)
    if scheme is not None:
        check_formats(scheme, place)
    model.allocate(place)
    fill(model.parts(names_in(files)), files, progress)
    return model


def prepare(
    model: Denoiser, path: Path, config: Config, requested: Scheme | None
) -> tuple[list[WeightFile], Scheme | None]:
    """Check a checkpoint against its model, which has no storage, so a wrong one costs no memory.

    Gives the model the checkpoint's facts and formats, in place; returns its files and the scheme.
    """
    model.spec = with_recommended(model.spec, path)
    files, stored = open_checkpoint(path, config)
    scheme = one_of(requested, stored, path)
    names = names_in(files)
    account(model.parts(names), files, path)
    if scheme is not None:
        model.quantize(scheme, names)
    return files, scheme


def open_checkpoint(path: Path, config: Config) -> tuple[list[WeightFile], Scheme | None]:
    """Open a folder's weights; for a quantized checkpoint, also return the formats it stores."""
    if (path / LINK).is_file():
        gguf = GGUFFile(read_gguf((path / LINK).resolve()))
        return [gguf], gguf.scheme
    files = open_weights(path)
    read = read_layout(config, path)
    if read is None:
        return files, None
    whole = QuantizedFile(read, files, path)
    return [whole], whole.scheme


def one_of(requested: Scheme | None, stored: Scheme | None, path: Path) -> Scheme | None:
    """Return the requested scheme or the checkpoint's own; refuse both together."""
    if requested is not None and stored is not None:
        raise ValueError(
            f"quantization is {requested.given}, but {path} is quantized already; leave it out"
        )
    return requested or stored


def names_in(files: Items[HasTensors]) -> set[str]:
    """Return the names of all tensors except those that are computed here."""
    return {name for file in files for name in file.tensors if not _COMPUTED.search(name)}


def account(parts: Parts, files: Items[HasTensors], path: Path) -> None:
    """Compare the files' tensors with the model's; report all differences in one error."""
    if complaints := differences(parts, files):
        raise CheckpointError(
            f"the tensors in {path} are not those of the model that its config.json describes: "
            f"{complaints}. Check that config.json and weights belong together and "
            f"that the download is complete"
        )


def differences(parts: Parts, files: Items[HasTensors]) -> str:
    """Return what is wrong with the files' names, shapes and dtypes; empty if nothing is."""
    stored: dict[str, Stored] = {}
    twice = []
    for file in files:
        twice += [name for name in file.tensors if name in stored]
        stored |= file.tensors
    names = names_in(files)
    missing = [n for n, part in parts.items() if n not in names and not part.optional]
    unexpected = sorted(names - parts.keys())
    both = sorted(names & parts.keys())
    shapes = [
        f"{n} is {list(stored[n].shape)}, not {list(parts[n].shape)}"
        for n in both
        if stored[n].shape != parts[n].shape
    ]
    dtypes = [f"{n} is {stored[n].dtype}" for n in both if stored[n].dtype not in FLOATS]
    return "; ".join(
        f"{len(found)} {what}: {listed(found)}"
        for what, found in (
            ("missing", missing),
            ("unexpected", unexpected),
            ("of another shape than config.json says", shapes),
            (f"of a dtype that is none of {', '.join(FLOATS)}", dtypes),
            ("in two files", twice),
        )
        if found
    )


def fill(parts: Parts, files: Items[WeightFile], progress: bool) -> None:
    """Copy each tensor's slice into its parameter, in place; missing optional ones become zero."""
    from tqdm import tqdm

    names = names_in(files)
    for name, part in parts.items():
        if name not in names:
            for piece in part.pieces:
                assert isinstance(piece.target, Tensor)  # no matrix is optional
                piece.target.zero_()
    hidden = None if progress else True  # None: shown only on a terminal
    with tqdm(total=len(names), desc="weights", unit="", delay=2, disable=hidden) as bar:
        for file in files:
            for name in file.tensors:
                if name in names:
                    copy_bands(parts[name], name, file)
                    bar.update()


def copy_bands(part: Part, name: str, file: WeightFile) -> None:
    """Copy a tensor into its places, some rows at a time."""
    for piece in _bands(part):
        _copy(piece, name, file, len(part.shape))


def _copy(piece: Piece, name: str, file: WeightFile, dims: int) -> None:
    """Copy a piece's slice of a tensor into its target; quantize it if the target is quantized."""
    target, index = piece
    if isinstance(target, Tensor):
        read = file.read(name, index)
        assert isinstance(read, Tensor)
        target.copy_(read)
        check_finite(target, name, file)
        return
    # Scales are computed from whole rows, so they do not depend on the number of ranks.
    read = file.read(name, index[: dims - 1])
    if isinstance(read, Tensor):
        check_finite(read, name, file)
        read = quantize(send(read, target.scale_EOG.device), target.format)
    check_finite(read.scale_EOG, name, file)
    if read.format.has_minimum and read.zero_EOG is not None:
        check_finite(read.zero_EOG, name, file)
    if len(index) == dims:
        read = read.between(index[-1].start, index[-1].stop)
    target.copy_(read)


def look_through(parts: Parts, files: Items[WeightFile], dtype: torch.dtype) -> None:
    """Read this rank's share of the tensors, as `fill` will; refuse NaN and infinite values."""
    names = names_in(files)
    for file in files:
        for name in file.tensors:
            if name in names:
                for _, index in _bands(parts[name]):
                    read = file.read(name, index)
                    assert isinstance(read, Tensor)
                    check_finite(read.to(dtype), name, file)


def check_finite(read: Tensor, name: str, file: WeightFile) -> None:
    """Refuse weights that are NaN or infinite."""
    if read.numel() and not all(extreme.isfinite() for extreme in read.aminmax()):
        dtype = str(read.dtype).removeprefix("torch.")
        raise CheckpointError(
            f"{name} in {file.path} is NaN or infinite in {dtype}; download it again, "
            "or choose a dtype of a larger range"
        )


def _bands(part: Part) -> Iterator[Piece]:
    """Yield bands of rows, so that only a small part of a file is mapped at a time."""
    for target, index in part.pieces:
        # Quantizing a band takes several times its size.
        limit = _BAND if isinstance(target, Tensor) else _QUANTIZED_BAND
        if target.nbytes <= limit:
            yield Piece(target, index)
            continue
        start = index[0].start or 0
        rows = max(limit * len(target) // target.nbytes, 1)
        for row in range(0, len(target), rows):
            band = target[row : row + rows]
            place = slice(start + row, start + row + len(band))
            yield Piece(band, (place, *index[1:]))
