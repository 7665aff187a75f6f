"""Quantized checkpoints: the layouts of compressed-tensors and of GPTQ, read as one file.

A matrix that they store in several tensors is here one tensor under the usual name, `.weight`,
whose slices are quantized. Letters: O output rows, I input columns, G scales of a row.
"""

import re
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from diffray.components.checkpoints.folder import CheckpointError
from diffray.components.checkpoints.schemes import Group, gptq_format, groups_of
from diffray.components.checkpoints.weights import Stored, WeightFile
from diffray.components.layers import Index
from diffray.components.models.fields import Config, shown
from diffray.components.quantization import Scheme
from diffray.kernels.formats import Format
from diffray.kernels.quantize import Quantized

_EXPERT = re.compile(r"\.experts\.\d+\.")


class Tensors:
    """All tensors of a checkpoint's files, by name."""

    def __init__(self, files: list[WeightFile]) -> None:
        self._home = {name: file for file in files for name in file.tensors}
        self.stored = {name: file.tensors[name] for name, file in self._home.items()}

    def read(self, name: str, index: Index = ()) -> Tensor:
        found = self._home[name].read(name, index)
        assert isinstance(found, Tensor)
        return found

    def has(self, name: str, dtype: str, *shape: int) -> bool:
        found = self.stored.get(name)
        return found is not None and found.dtype == dtype and found.shape == shape


class Layout(Protocol):
    """How a checkpoint stores its quantized matrices."""

    @property
    def main(self) -> tuple[str, ...]:
        """The endings of the tensor with a quantized module's numbers."""
        ...

    @property
    def members(self) -> tuple[str, ...]:
        """The endings of all its tensors."""
        ...

    def format_of(self, module: str, tensors: Tensors) -> Format: ...

    def shape_of(self, module: str, form: Format, tensors: Tensors) -> tuple[int, int]:
        """Return the matrix's shape; refuse tensors that do not fit together."""
        ...

    def read(self, module: str, form: Format, rows: slice, tensors: Tensors) -> Quantized: ...


class QuantizedFile:
    """The files of a quantized checkpoint, seen as one with plain names."""

    def __init__(self, layout: Layout, files: list[WeightFile], path: Path) -> None:
        self.path = path
        self._layout, self._all = layout, Tensors(files)
        stored = self._all.stored
        forms: dict[str, Format] = {}
        for name in stored:
            module = next((name.removesuffix(end) for end in layout.main if name.endswith(end)), "")
            if module and (name.endswith(layout.main[0]) or f"{module}.weight_scale" in stored):
                forms[module] = layout.format_of(module, self._all)
        if not forms:
            raise CheckpointError(
                f"{path / 'config.json'} says that the model is quantized, but no tensor is; "
                "remove its 'quantization_config'"
            )
        hidden = {module + end for module in forms for end in layout.members}
        self.tensors = {name: own for name, own in stored.items() if name not in hidden}
        for module, form in forms.items():
            shape = layout.shape_of(module, form, self._all)
            self.tensors[f"{module}.weight"] = Stored(shape, "F32")
        self._forms = forms
        self.scheme = Scheme("the checkpoint's own", stored=forms)

    def read(self, name: str, index: Index) -> Tensor | Quantized:
        module = name.removesuffix(".weight")
        if module not in self._forms:
            return self._all.read(name, index)
        form = self._forms[module]
        (rows,) = index or (slice(0, self.tensors[name].shape[0]),)
        stop = self.tensors[name].shape[0] if rows.stop is None else rows.stop
        return self._layout.read(module, form, slice(rows.start or 0, stop), self._all)


def read_layout(config: Config, path: Path) -> Layout | None:
    """Return the layout that config.json names; None if the model is not quantized."""
    given = config.get("quantization_config", config.get("compression_config"))
    if given is None:
        return None
    method = given.get("quant_method") if isinstance(given, dict) else None
    if isinstance(given, dict) and method == "compressed-tensors":
        return CompressedTensors(groups_of(given))
    if isinstance(given, dict) and method == "gptq":
        return GPTQ(*gptq_format(given))
    raise CheckpointError(
        f"{path / 'config.json'}: the 'quantization_config' has the quant_method {shown(method)}; "
        "expected compressed-tensors or gptq, or a checkpoint that is not quantized"
    )


class CompressedTensors:
    """`weight_packed` holds numbers in int32 words; or `weight` is int8 or float8."""

    main = (".weight_packed", ".weight")
    members = (
        ".weight_packed",
        ".weight_scale",
        ".weight_shape",
        ".weight_zero_point",
        ".weight_g_idx",
        ".weight",
    )

    def __init__(self, groups: list[Group]) -> None:
        self._groups = groups

    def format_of(self, module: str, tensors: Tensors) -> Format:
        group = next((each for each in self._groups if each.names(module)), None)
        group = group or next((each for each in self._groups if each.names_linear), None)
        if group is None:
            raise CheckpointError(
                f"{module} is quantized, but no config group of the 'quantization_config' matches "
                "it; download config.json again"
            )
        packed = f"{module}.weight_packed" in tensors.stored
        return group.format(packed=packed, expert=_EXPERT.search(module) is not None)

    def shape_of(self, module: str, form: Format, tensors: Tensors) -> tuple[int, int]:
        stored = tensors.stored
        packed = stored.get(f"{module}.weight_packed")
        if packed is None:
            weight = stored[f"{module}.weight"]
            dtype = "F8_E4M3" if form.is_float8 else "I8"
            if weight.dtype != dtype or len(weight.shape) != 2:
                raise _torn(module, f"weight is {weight.dtype} and not a matrix of {dtype}")
            rows, columns = weight.shape
        else:
            if f"{module}.weight_shape" not in stored:
                raise _torn(module, "there is no weight_shape")
            if stored[f"{module}.weight_shape"].shape != (2,):
                raise _torn(module, "weight_shape is not a pair of numbers")
            rows, columns = map(int, tensors.read(f"{module}.weight_shape"))
            if not tensors.has(f"{module}.weight_packed", "I32", rows, columns * form.bits // 32):
                raise _torn(module, "weight_packed does not have the size that weight_shape says")
            if columns * form.bits % 32:
                raise _torn(module, f"rows of {columns} weights do not fill their words")
        scales = form.scales_of(columns)
        scale = stored.get(f"{module}.weight_scale")
        fits = [(rows, scales)] + ([(rows,), (1,), ()] if scales == 1 else [])
        if scale is None or scale.shape not in fits or (form.group and columns % form.group):
            raise _torn(module, "weight_scale does not have one number for each row or group")
        zeros = -(-rows * form.bits // 32), scales
        if form.has_zero and not tensors.has(f"{module}.weight_zero_point", "I32", *zeros):
            raise _torn(module, "weight_zero_point does not have one number for each scale")
        if f"{module}.weight_g_idx" in stored:
            raise _torn(module, "its columns are reordered (weight_g_idx), which is not supported")
        return rows, columns

    def read(self, module: str, form: Format, rows: slice, tensors: Tensors) -> Quantized:
        scale = tensors.read(f"{module}.weight_scale").float()
        whole = tensors.stored[f"{module}.weight_scale"].shape
        if whole in ((), (1,)):  # one for the whole matrix
            scale_OG = scale.reshape(1, 1).expand(rows.stop - rows.start, 1)
        else:
            scale_OG = scale[rows] if len(whole) == 2 else scale[rows].unsqueeze(1)
        if f"{module}.weight_packed" not in tensors.stored:
            values = tensors.read(f"{module}.weight", (rows,))
            return Quantized(form, values, scale_OG, None)
        words = tensors.read(f"{module}.weight_packed", (rows,)).contiguous()
        zero = None
        if form.has_zero:
            per = 32 // form.bits
            taken = slice(rows.start // per, -(-rows.stop // per))
            packed = tensors.read(f"{module}.weight_zero_point", (taken,))
            first = taken.start * per
            zero = _unpack_rows(packed, form.bits)[rows.start - first : rows.stop - first]
        return Quantized(form, _numbers(words, form), scale_OG, zero)


class GPTQ:
    """`qweight` holds the numbers of a column in int32 words, transposed."""

    main = (".qweight",)
    members = (".qweight", ".qzeros", ".scales", ".g_idx")

    def __init__(self, form: Format, added: int) -> None:
        self._form = form
        self._added = added  # to zero points: the first version stores them one too small

    def format_of(self, module: str, tensors: Tensors) -> Format:
        return self._form

    def shape_of(self, module: str, form: Format, tensors: Tensors) -> tuple[int, int]:
        stored = tensors.stored
        per = 32 // form.bits
        words = stored[f"{module}.qweight"]
        if len(words.shape) != 2 or words.dtype != "I32":
            raise _torn(module, "qweight is not a matrix of I32")
        columns, rows = words.shape[0] * per, words.shape[1]
        scales = form.scales_of(columns)
        scale = stored.get(f"{module}.scales")
        if scale is None or scale.shape != (scales, rows) or (form.group and columns % form.group):
            raise _torn(module, "scales does not have one number for each row or group")
        if rows % per or not tensors.has(f"{module}.qzeros", "I32", scales, rows // per):
            raise _torn(module, "qzeros does not have one number for each scale")
        if f"{module}.g_idx" in stored:
            order = tensors.read(f"{module}.g_idx").long()
            if not torch.equal(order, torch.arange(columns) // (form.group or columns)):
                raise _torn(module, "its columns are reordered (g_idx), which is not supported")
        return rows, columns

    def read(self, module: str, form: Format, rows: slice, tensors: Tensors) -> Quantized:
        words = tensors.read(f"{module}.qweight", (slice(None), rows)).t().contiguous()
        scale_OG = tensors.read(f"{module}.scales", (slice(None), rows)).t().float()
        zeros_GO = tensors.read(f"{module}.qzeros").t().contiguous()
        most = (1 << form.bits) - 1
        zero_OG = (_unpack_rows(zeros_GO, form.bits).int() + self._added) & most
        zero_OG = zero_OG[rows]
        if form.has_zero:
            return Quantized(form, _numbers(words, form), scale_OG, zero_OG.to(torch.uint8))
        if not bool((zero_OG == 1 << (form.bits - 1)).all()):
            raise _torn(module, "'sym' is true, but its zero points are not the middle")
        return Quantized(form, _numbers(words, form), scale_OG, None)


def _numbers(words_OI: Tensor, form: Format) -> Tensor:
    """Return the numbers in rows of int32 words, which have the same layout as here."""
    held = words_OI.view(torch.uint8)
    return (held ^ 0x80).view(torch.int8) if form.kind == "int8" else held


def _unpack_rows(words_OG: Tensor, bits: int) -> Tensor:
    """Return the numbers in int32 words, with those of each word in consecutive rows."""
    shifts = torch.arange(0, 32, bits, dtype=torch.int32).view(1, -1, 1)
    numbers = (words_OG.unsqueeze(1) >> shifts) & ((1 << bits) - 1)
    return numbers.flatten(0, 1).to(torch.uint8)


def _torn(module: str, why: str) -> CheckpointError:
    return CheckpointError(f"{module}: {why}; download the checkpoint again, or use another")
