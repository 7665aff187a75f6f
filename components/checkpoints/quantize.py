"""Writes a quantized copy of a checkpoint, in the layout of compressed-tensors.

Matrices are read, rounded and written one after the other; everything else is copied unchanged.
"""

import re
from collections.abc import Callable, Iterable
from functools import lru_cache
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor
from torch.nn import functional

from diffray.components.checkpoints.checkpoint import (
    account,
    check_finite,
    copy_bands,
    names_in,
    open_checkpoint,
)
from diffray.components.checkpoints.folder import CheckpointError, read_config, resolve
from diffray.components.checkpoints.weights import Stored, WeightFile
from diffray.components.checkpoints.writer import Written, new_folder, write_checkpoint
from diffray.components.layers import Part, Piece
from diffray.components.mesh import Mesh
from diffray.components.models.registry import choose_build
from diffray.components.quantization import Given, parse_quantization
from diffray.components.quantized_parts import chosen_formats, module_of
from diffray.kernels.formats import Format
from diffray.kernels.quantize import Quantized

_LAYOUTS: Final = {
    "w8a8": "int-quantized",
    "fp8": "float-quantized",
    "w8a8_fp8": "float-quantized",
}
_PACKED: Final = "pack-quantized"


def quantize_checkpoint(
    src: str | Path,
    dst: str | Path,
    quantization: Given,
    *,
    max_shard_bytes: int = 5 * 10**9,
    progress: bool = True,
) -> Path:
    """Write `src`, quantized, to the new folder `dst`, atomically; return `dst`."""
    scheme = parse_quantization(quantization)
    source, target = resolve(src), new_folder(dst)
    config = read_config(source)
    model = choose_build(config)(config, Mesh(), torch.float32)
    files, stored = open_checkpoint(source, config)
    if stored is not None:
        raise CheckpointError(f"{source} is quantized already; use the original checkpoint")
    names = names_in(files)
    parts = model.parts(names)
    account(parts, files, source)
    chosen = {id(weight): form for weight, form in chosen_formats(parts, scheme)}
    forms = {
        name: chosen[id(part.weight)]
        for name, part in parts.items()
        if name in names and part.weight is not None and id(part.weight) in chosen
    }
    for name, form in forms.items():
        if form.in_blocks:
            raise ValueError(
                f"the copy's layout has no {form.kind}, which is GGUF's; give it to "
                "--quantization when serving, or choose int8_g32 or int4_g32"
            )
        _refuse_shape(name, parts[name], form)
    outputs: list[Written] = []
    for file in files:
        for name in sorted(names & file.tensors.keys()):
            if name in forms:
                outputs += _quantized(name, parts[name], forms[name], file)
            else:
                outputs.append(Written(name, file.tensors[name], _copied(name, file)))
    linear = {n for n, p in parts.items() if p.weight is not None and len(p.shape) == 2}
    about = _config_of({module_of(name): form for name, form in forms.items()}, linear)

    def check(work: Path) -> None:
        written, _ = open_checkpoint(work, read_config(work))
        account(parts, written, work)

    write_checkpoint(
        source,
        target,
        outputs,
        {**config, "quantization_config": about},
        check,
        max_shard_bytes=max_shard_bytes,
        progress=progress,
    )
    return target


def _refuse_shape(name: str, part: Part, form: Format) -> None:
    if not name.endswith(".weight") or len(part.shape) != 2:
        raise CheckpointError(
            f"{name} holds the matrices of several experts, which the quantized layout stores "
            "separately; quantize the checkpoint that it was made from"
        )
    if part.shape[1] * form.bits % 32:
        raise CheckpointError(
            f"{name} has rows of {part.shape[1]} weights, which do not fill the layout's words of "
            "32 bits; exclude it by a pattern with the format none"
        )


def _copied(name: str, file: WeightFile) -> Callable[[], Iterable[Tensor]]:
    def read() -> Iterable[Tensor]:
        found = file.read(name, ())
        assert isinstance(found, Tensor)
        check_finite(found, name, file)
        yield found

    return read


def _quantized(name: str, part: Part, form: Format, file: WeightFile) -> list[Written]:
    """Return the tensors of a matrix, which is rounded once, when the first is written."""
    module, (rows, columns) = module_of(name), part.shape
    scales = form.scales_of(columns)

    @lru_cache(1)
    def kept() -> Quantized:
        made = Quantized.empty(part.shape, form, "cpu")
        copy_bands(Part(part.shape, (Piece(made, (slice(0, rows),)),)), name, file)
        return made

    def finish() -> Iterable[Tensor]:
        yield kept().scale_EOG
        kept.cache_clear()

    def output(ending: str, shape: tuple[int, ...], dtype: str, make: Make) -> Written:
        return Written(f"{module}.{ending}", Stored(shape, dtype), make)

    if form.kind in _LAYOUTS:
        dtype = "F8_E4M3" if form.is_float8 else "I8"
        found = [output("weight", (rows, columns), dtype, lambda: [kept().values_EOI])]
    else:
        words = columns * form.bits // 32
        shape = torch.tensor([rows, columns])
        found = [
            output("weight_packed", (rows, words), "I32", lambda: [_words(kept())]),
            output("weight_shape", (2,), "I64", lambda: [shape]),
        ]
    if form.has_zero:
        words = -(-rows * form.bits // 32)
        found.append(output("weight_zero_point", (words, scales), "I32", lambda: [_zeros(kept())]))
    return [*found, output("weight_scale", (rows, scales), "F32", finish)]


Make = Callable[[], Iterable[Tensor]]


def _words(kept: Quantized) -> Tensor:
    """Return the numbers in 32-bit words, as they are kept except for the sign of int8."""
    values = kept.values_EOI
    if kept.format.kind == "int8":
        values = values.view(torch.uint8) ^ 0x80
    words: Tensor = values.view(torch.int32)
    return words


def _zeros(kept: Quantized) -> Tensor:
    """Return the zero points, with consecutive rows of each column packed into words."""
    assert kept.zero_EOG is not None
    bits = kept.format.bits
    per = 32 // bits
    zero = functional.pad(kept.zero_EOG.long(), (0, 0, 0, -len(kept.zero_EOG) % per))
    shifts = torch.arange(0, 32, bits).view(1, per, 1)
    words: Tensor = (zero.unflatten(0, (-1, per)) << shifts).sum(1)
    return words.to(torch.int32)


def _config_of(forms: dict[str, Format], linear: set[str]) -> dict[str, Any]:
    """Return the `quantization_config` for modules and their formats."""
    groups: dict[Format, list[str]] = {}
    for module, form in forms.items():
        groups.setdefault(form, []).append(module)
    layouts = {_layout(form) for form in groups}
    everything = {module_of(name) for name in linear}
    return {
        "quant_method": "compressed-tensors",
        "format": layouts.pop() if len(layouts) == 1 else "mixed-precision",
        "quantization_status": "compressed",
        "config_groups": {
            f"group_{number}": {
                "targets": _targets(modules, everything - {*modules}),
                "weights": _weights(form),
                "input_activations": _activations(form) if form.rounds_inputs else None,
                "output_activations": None,
                "format": _layout(form),
            }
            for number, (form, modules) in enumerate(groups.items())
        },
        "ignore": sorted(everything - forms.keys()),
        "kv_cache_scheme": None,
        "global_compression_ratio": None,
    }


def _layout(form: Format) -> str:
    return _LAYOUTS.get(form.kind, _PACKED)


def _targets(modules: list[str], others: set[str]) -> list[str]:
    """Return patterns for modules that differ only in numbers, or names where they fit others."""
    patterns: dict[str, list[str]] = {}
    for module in modules:
        pattern = "[0-9]+".join(map(re.escape, re.split(r"(?<=\.)[0-9]+(?=\.)", module))) + "$"
        patterns.setdefault(pattern, []).append(module)
    targets: list[str] = []
    for pattern, own in patterns.items():
        foreign = any(re.match(pattern, other) for other in others)
        targets += own if foreign else [f"re:{pattern}"]
    return targets


def _weights(form: Format) -> dict[str, Any]:
    return {
        "num_bits": form.bits,
        "type": _type(form),
        "symmetric": not form.has_zero,
        "strategy": "group" if form.group else "channel",
        "group_size": form.group or None,
        "dynamic": False,
    }


def _type(form: Format) -> str:
    return "float" if form.is_float8 else "int"


def _activations(form: Format) -> dict[str, Any]:
    return {
        "num_bits": 8,
        "type": _type(form),
        "symmetric": True,
        "strategy": "token",
        "dynamic": True,
    }
