"""The weight files of a checkpoint folder: their tensors, and slices of them.

Opening reads only headers; slices are read on demand.
"""

import math
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from diffray.components.checkpoints.folder import CheckpointError, listed, read_json, reason_of
from diffray.components.layers import Index
from diffray.components.models.fields import shown
from diffray.kernels.quantize import Quantized

FLOATS = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
}
# Additional dtypes of quantized checkpoints.
WHOLE = {
    "F8_E4M3": torch.float8_e4m3fn,
    "I8": torch.int8,
    "U8": torch.uint8,
    "I32": torch.int32,
    "I64": torch.int64,
}
_MAPPED = 32 << 20  # bytes
_SINGLE = ("model.safetensors", "pytorch_model.bin")


class Stored(NamedTuple):
    """A tensor as described in a header; `dtype` is safetensors' name."""

    shape: tuple[int, ...]
    dtype: str

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def row_bytes(self) -> int:
        return math.prod(self.shape[1:]) * (FLOATS | WHOLE)[self.dtype].itemsize


class HasTensors(Protocol):
    """Anything that describes tensors."""

    @property
    def tensors(self) -> dict[str, Stored]: ...


class WeightFile(HasTensors, Protocol):
    """One open file."""

    @property
    def path(self) -> Path: ...

    def read(self, name: str, index: Index) -> Tensor | Quantized: ...


class SafetensorsFile:
    """A safetensors file; reads only the requested slice.

    Slices are views of the mapped file. Mapped pages count as this process's memory until the file
    is closed, so it is reopened from time to time; the system keeps it cached anyway.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._mapped = 0
        try:
            self._file = safe_open(path, framework="pt")
            names = self._file.keys()  # type: ignore[no-untyped-call]
            views = {name: self._slice(name) for name in names}
            self.tensors = {
                name: Stored(tuple(view.get_shape()), view.get_dtype())
                for name, view in views.items()
            }
        except (SafetensorError, OSError, ValueError, OverflowError) as error:
            raise CheckpointError(
                f"{path} is truncated or not a safetensors file ({reason_of(error)}); "
                "download it again"
            ) from error

    def read(self, name: str, index: Index) -> Tensor:
        if self._mapped > _MAPPED:
            self._file, self._mapped = safe_open(self.path, framework="pt"), 0
        tensor: Tensor = self._slice(name)[index]
        # A slice of columns maps whole rows.
        self._mapped += len(tensor) * self.tensors[name].row_bytes
        return tensor

    def _slice(self, name: str) -> Any:  # safetensors' views are untyped
        return self._file.get_slice(name)  # type: ignore[no-untyped-call]


class TorchFile:
    """A pickled state dict, mapped into memory; its code is never executed."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            state = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        except Exception as error:  # torch's reader raises all kinds of errors for a damaged file
            raise CheckpointError(
                f"{path} is truncated or not a state dict that torch loads safely "
                f"({reason_of(error)}); download it again, or save it as safetensors"
            ) from error
        if not isinstance(state, dict) or not all(map(_is_plain, state.items())):
            raise CheckpointError(f"{path} is not a flat dict of tensors; save it as safetensors")
        self._state: dict[str, Tensor] = state
        known = {dtype: name for name, dtype in (FLOATS | WHOLE).items()}
        self.tensors = {
            name: Stored(tuple(tensor.shape), known.get(tensor.dtype, str(tensor.dtype)))
            for name, tensor in self._state.items()
        }

    def read(self, name: str, index: Index) -> Tensor:
        return self._state[name][index]


def _is_plain(item: tuple[object, object]) -> bool:
    """Return whether this is a named tensor with its data in the file."""
    name, tensor = item
    return (
        isinstance(name, str)
        and isinstance(tensor, Tensor)
        and tensor.layout == torch.strided
        and tensor.device.type == "cpu"
    )


def open_weights(folder: Path) -> list[WeightFile]:
    """Open the folder's weights: one file, or the files of an index; safetensors come first."""
    for single in _SINGLE:
        if (folder / single).is_file():
            return [_open(folder / single)]
        index = folder / f"{single}.index.json"
        if index.is_file():
            return _open_index(index)
    loose = sorted(file.name for file in folder.glob("*.safetensors"))
    hint = f" (found {listed(loose)}, but no index)" if loose else ""
    looked = ", ".join(f"{single}, {single}.index.json" for single in _SINGLE)
    raise CheckpointError(f"{folder} contains no weights{hint}; looked for {looked}")


def _open(path: Path) -> WeightFile:
    return SafetensorsFile(path) if path.suffix == ".safetensors" else TorchFile(path)


def _open_index(index: Path) -> list[WeightFile]:
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{index} has no 'weight_map'; download it again")
    suffix = ".safetensors" if index.name.startswith("model.safetensors") else ".bin"
    for tensor, name in weight_map.items():
        if not isinstance(name, str) or Path(name).name != name:
            raise CheckpointError(
                f"{index} names {shown(name)} for {shown(tensor)}, which is not in its folder"
            )
        if not name.endswith(suffix):
            raise CheckpointError(
                f"{index} names {shown(name)} for {shown(tensor)}, which is not a {suffix} file"
            )
    names = sorted(set(weight_map.values()))
    absent = [name for name in names if not (index.parent / name).is_file()]
    if absent:
        raise CheckpointError(
            f"{index} names files that are not there: {listed(absent)}; "
            f"the download is incomplete, download them again"
        )
    files = [_open(index.parent / name) for name in names]
    home = {name: file.path.name for file in files for name in file.tensors}
    lost = [name for name, file in weight_map.items() if home.get(name) != file]
    if lost:
        raise CheckpointError(
            f"{index} lists tensors that are missing from their files: {listed(lost)}; "
            f"index and files do not belong together, download them again"
        )
    return files
