"""Loads a model's shard from a checkpoint on disk or on the Hub.

All tensors are checked before the first is read; then each is copied straight into place.
"""

import re
from collections.abc import Iterator
from collections.abc import Sequence as Items
from pathlib import Path

import torch
from torch import Tensor

from diffray.components.backend import choose_device, choose_dtype, choose_quantization
from diffray.components.checkpoints.demos import DEMOS, HUB_ID, demo_path
from diffray.components.checkpoints.weights import (
    FLOATS,
    CheckpointError,
    Stored,
    WeightFile,
    listed,
    open_weights,
    read_json,
)
from diffray.components.config import did_you_mean
from diffray.components.denoiser import Denoiser
from diffray.components.layers import Part, Parts, Piece
from diffray.components.mesh import Mesh
from diffray.components.models.fields import Config, shown
from diffray.components.models.registry import build_model
from diffray.kernels.choose import choose_kernels
from diffray.kernels.variants import UNTRIED, Choices

# Buffers that some checkpoints contain and that are computed here.
_COMPUTED = re.compile(r"(^|\.)rotary_emb\.(inv_freq|original_inv_freq)$")
_BAND = 32 << 20  # bytes
_FILES = ["*.safetensors", "*.json", "*.jinja", "*.model", "*.txt"]


def load_model(
    path_or_hub_id: str | Path,
    *,
    dtype: str = "auto",
    device: str = "auto",
    mesh: Mesh | None = None,
    progress: bool = True,
    kernels: str = "auto",
    choices: Choices = UNTRIED,
    quantization: str | None = None,
) -> Denoiser:
    """Return the model with this rank's weights; reads only this rank's share."""
    place = choose_device(device)
    number = choose_dtype(dtype, place)
    quantized = choose_quantization(quantization, place)
    path = resolve(path_or_hub_id)
    config = read_config(path)
    chosen = choose_kernels(kernels, place, number, choices)
    model = build_model(config, mesh or Mesh(), number, chosen)
    if quantized is not None and not model.routed:
        raise ValueError(
            f"quantization is {quantization!r}, but {path} has no experts; leave it out"
        )
    files = open_weights(path)
    # Checked while the model has no storage, so a wrong checkpoint costs no memory.
    account(model.parts(names_in(files)), files, path)
    model.allocate(place)
    fill(model.parts(names_in(files)), files, progress)
    if quantized is not None:
        model.quantize(quantized)
    return model


def names_in(files: Items[WeightFile]) -> set[str]:
    """Return the names of all tensors except those that are computed here."""
    return {name for file in files for name in file.tensors if not _COMPUTED.search(name)}


def account(parts: Parts, files: Items[WeightFile], path: Path) -> None:
    """Compare the files' tensors with the model's; report all differences in one error."""
    if complaints := differences(parts, files):
        raise CheckpointError(
            f"the tensors in {path} are not those of the model that its config.json describes: "
            f"{complaints}. Check that config.json and weights belong together and "
            f"that the download is complete"
        )


def differences(parts: Parts, files: Items[WeightFile]) -> str:
    """Return what is wrong with the files' names, shapes and dtypes; empty: nothing."""
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
                piece.target.zero_()
    hidden = None if progress else True  # None: shown only on a terminal
    with tqdm(total=len(names), desc="weights", unit="", delay=2, disable=hidden) as bar:
        for file in files:
            for name in file.tensors:
                if name in names:
                    for target, index in _bands(parts[name]):
                        target.copy_(file.read(name, index))
                        _check(target, name, file)
                    bar.update()


def look_through(parts: Parts, files: Items[WeightFile], dtype: torch.dtype) -> None:
    """Read this rank's share of the tensors, as `fill` will; refuse what is NaN or infinite."""
    names = names_in(files)
    for file in files:
        for name in file.tensors:
            if name in names:
                for _, index in _bands(parts[name]):
                    _check(file.read(name, index).to(dtype), name, file)


def _check(read: Tensor, name: str, file: WeightFile) -> None:
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
        if target.nbytes <= _BAND:
            yield Piece(target, index)
            continue
        start = index[0].start or 0
        rows = max(_BAND * len(target) // target.nbytes, 1)
        for row in range(0, len(target), rows):
            band = target[row : row + rows]
            place = slice(start + row, start + row + len(band))
            yield Piece(band, (place, *index[1:]))


def resolve(path_or_hub_id: str | Path) -> Path:
    """Return the checkpoint's folder: a demo's, a local one, or one downloaded from the Hub."""
    demo = demo_path(str(path_or_hub_id))
    if demo is not None:
        return demo
    path = Path(path_or_hub_id).expanduser()
    if path.is_dir():
        return path
    if path.exists():
        raise CheckpointError(f"{path} is a file; give the checkpoint's folder")
    name = str(path_or_hub_id)
    if "/" not in name and (near := did_you_mean(name, DEMOS)):
        raise CheckpointError(f"there is no folder or demo model {name!r}{near}")
    if not HUB_ID.fullmatch(name):
        raise CheckpointError(
            f"there is no folder {name!r}, and it is not a Hub id (OWNER/NAME); give a "
            "checkpoint's folder or its Hub id"
        )
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    try:
        folder = Path(snapshot_download(name, allow_patterns=_FILES))
        if not any(folder.glob("*.safetensors")):
            folder = Path(snapshot_download(name, allow_patterns=[*_FILES, "pytorch_model*.bin"]))
    except (HfHubHTTPError, HFValidationError, OSError) as error:
        raise CheckpointError(_why_not(name, error)) from error
    return folder


def _why_not(name: str, error: Exception) -> str:
    """Return why a checkpoint could not be downloaded, and what to do."""
    from huggingface_hub.errors import (
        GatedRepoError,
        LocalEntryNotFoundError,
        OfflineModeIsEnabled,
        RepositoryNotFoundError,
    )

    match error:
        case LocalEntryNotFoundError() | OfflineModeIsEnabled():
            return (
                f"{name!r} was not downloaded before, and the Hugging Face Hub cannot be reached; "
                "give a checkpoint's folder, connect this machine to the internet, or set HF_HOME "
                "to a folder with downloads"
            )
        case GatedRepoError():
            return (
                f"{name!r} needs its owner's permission; ask for it at "
                f"https://huggingface.co/{name} and set HF_TOKEN"
            )
        case RepositoryNotFoundError():
            return (
                f"the Hugging Face Hub shows no {name!r}; give a checkpoint's folder, its Hub id, "
                f"or one of: {', '.join(DEMOS)}, and for a private model set HF_TOKEN"
            )
        case _:
            reason = next(iter(str(error).split("\n")), "").strip()
            return f"{name!r} could not be downloaded ({type(error).__name__}: {reason})"


def read_config(path: Path) -> Config:
    """Read the checkpoint's config.json."""
    if not (path / "config.json").is_file():
        raise CheckpointError(f"{path} has no config.json; give the folder of a checkpoint")
    config = read_json(path / "config.json")
    names = config.get("architectures") or []
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise CheckpointError(
            f"{path / 'config.json'}: 'architectures' is {shown(names)}; expected a list of names"
        )
    return config
