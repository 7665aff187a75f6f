"""Facts about a checkpoint, from its config and its files' headers."""

import math
import re
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from diffray.components.backend import DTYPES
from diffray.components.checkpoints.checkpoint import account, names_in, one_of, open_checkpoint
from diffray.components.checkpoints.folder import read_config, resolve
from diffray.components.checkpoints.recommended import with_recommended
from diffray.components.checkpoints.special_tokens import find_ids
from diffray.components.denoiser import Denoiser
from diffray.components.kv_pool import position_bytes
from diffray.components.mesh import Mesh
from diffray.components.models.advice import told
from diffray.components.models.registry import choose_build, rank_counts
from diffray.components.policy import DiffusionParams, Policy, accepted_by
from diffray.components.quantization import Given, Scheme, parse_quantization

_ROUTED = re.compile(r"\.(?:mlp\.(experts\.|w[12]$)|experts\.(?:gate_up|down)_proj$)")


@dataclass(frozen=True, slots=True)
class Info:
    """A checkpoint's shape, size and requirements."""

    path: Path
    family: str
    layout: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    experts: int  # per sparse layer; 0 in a dense model
    experts_chosen: int
    vocab: int
    max_positions: int
    block_causal: bool
    diffusion: dict[str, object]  # how requests are denoised by default
    accepts: dict[str, list[str] | bool]  # the decoders, iterations and caches that fit
    policies: dict[str, Any]  # the recommended one and its source, the exact, the approximate
    parameters: int
    parameters_active: int  # used per token
    bytes_on_disk: int
    bytes_in_memory: dict[str, int]  # by dtype, on one rank
    kv_bytes_per_position: dict[str, int]
    mask_token_id: int | None
    eos_token_ids: tuple[int, ...]
    tensor_parallel: tuple[int, ...]  # possible numbers of ranks
    expert_parallel: tuple[int, ...]


def describe(path_or_hub_id: str | Path, quantization: Given | None = None) -> Info:
    """Return the facts; raise if the checkpoint cannot be loaded."""
    path = resolve(path_or_hub_id)
    config = read_config(path)
    build = choose_build(config)
    model = build(config, Mesh(), torch.float32)
    files, stored = open_checkpoint(path, config)
    requested = None if quantization is None else parse_quantization(quantization)
    scheme = one_of(requested, stored, path)
    names = names_in(files)
    parts = model.parts(names)
    account(parts, files, path)
    sizes = {name: math.prod(parts[name].shape) for name in names}
    total = sum(sizes.values())
    routed = sum(size for name, size in sizes.items() if _ROUTED.search(name))
    experts, chosen = model.experts
    dims, spec = model.dims, with_recommended(model.spec, path)
    shapes = model.spec.kv_shapes
    masks = find_ids(path, config, "mask")
    diffusion = Policy.resolve(DiffusionParams(), spec).options()
    return Info(
        path=path,
        family=spec.family,
        layout=_layout(names),
        layers=dims.layers,
        hidden=dims.hidden,
        heads=dims.heads,
        kv_heads=dims.kv_heads,
        head_dim=dims.head_dim,
        experts=experts,
        experts_chosen=chosen,
        vocab=dims.vocab,
        max_positions=dims.rope.positions,
        block_causal=model.spec.block_causal,
        diffusion=diffusion,
        accepts=accepted_by(spec, masked=bool(masks)),
        policies=told(spec.family, diffusion),
        parameters=total,
        parameters_active=total - (routed - routed * chosen // experts if routed else 0),
        bytes_on_disk=sum(file.path.stat().st_size for file in files),
        bytes_in_memory={
            name: _num_bytes(build(config, Mesh(), dtype), scheme, names)
            for name, dtype in DTYPES.items()
        },
        kv_bytes_per_position={
            name: position_bytes(shapes, dtype, None) for name, dtype in DTYPES.items()
        },
        mask_token_id=masks[0] if masks else None,
        eos_token_ids=find_ids(path, config, "eos"),
        tensor_parallel=rank_counts(config, expert_parallel=False),
        expert_parallel=rank_counts(config, expert_parallel=True) if routed else (),
    )


def _layout(names: set[str]) -> str:
    """Say how the experts are stored."""
    found = [match.group(1) for name in names if (match := _ROUTED.search(name))]
    if not found:
        return "dense"
    if "experts." not in found:  # w1 and w2, or DiffusionGemma's
        return "fused experts"
    is_merged = any(name.endswith(".mlp.experts.gate_proj") for name in names)
    return "merged experts" if is_merged else "single experts"


def _num_bytes(model: Denoiser, scheme: Scheme | None, names: Collection[str]) -> int:
    if scheme is not None:
        model.quantize(scheme, names)
    return model.nbytes
