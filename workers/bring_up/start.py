"""Checks the kernels against torch's, once for each GPU and model shape.

Another process runs them (check.py), so one that crashes or hangs does no other harm. The findings
are stored on disk for the next start. No weights are needed, so this runs before they are loaded,
while memory is free.
"""

import sys
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path
from typing import Final

import torch

import diffray
from diffray.components.backend import (
    choose_device,
    choose_dtype,
    choose_quantization,
    gpu_facts,
)
from diffray.components.checkpoints.folder import read_config, resolve
from diffray.components.mesh import Mesh
from diffray.components.models.registry import kernels_for
from diffray.kernels import kernel
from diffray.workers.bring_up.check import CheckPlan
from diffray.workers.bring_up.child import TimeLimits, run_check
from diffray.workers.bring_up.findings import Findings, FindingsFile
from diffray.workers.bring_up.one_layer import Sizes, shapes_of
from diffray.workers.engine_options import EngineOptions

TABLE: Final = "diffray.kernels.triton.table"
LIMITS: Final = TimeLimits()

Say = Callable[[str], None]


def print_line(line: str) -> None:
    print(f"diffray: {line}", file=sys.stderr, flush=True)


def bring_up(
    model: str, setup: EngineOptions, mesh: Mesh, *, again: bool = False, say: Say = print_line
) -> Findings:
    """Return the findings about the kernels on this GPU; check them if there are none, or `again`.

    All ranks of a mesh must call this. Rank 0 checks its shard, and the others get its findings.
    """
    return from_rank_0(mesh, lambda: _bring_up(model, setup, mesh, again, say))


def from_rank_0(mesh: Mesh, find: Callable[[], Findings]) -> Findings:
    """Return rank 0's findings on all ranks, whose tokens might differ with other kernels."""
    found = find() if mesh.rank == 0 else Findings()
    return Findings.model_validate_json(mesh.share("findings", found.model_dump_json()))


def _bring_up(model: str, setup: EngineOptions, mesh: Mesh, again: bool, say: Say) -> Findings:
    plan = _plan_of(model, setup, mesh)
    if plan is None:
        return Findings()
    file = FindingsFile(key_of(plan))
    if not setup.bring_up:
        return file.read() or Findings()
    return read_or_check(plan, file, again=again, say=say)


def _plan_of(model: str, setup: EngineOptions, mesh: Mesh) -> CheckPlan | None:
    """Return what to check on a rank's device; None if there is nothing."""
    device = mesh.device or choose_device(setup.device)
    if device.type != "cuda":
        return None
    dtype = choose_dtype(setup.dtype, device)
    config = read_config(resolve(model))
    kernels = kernels_for(config, setup.kernels, device, dtype)
    choose_quantization(setup.quantization, device)
    if kernels.name != "triton":
        return None
    sizes = Sizes(
        config=config,
        dtype=str(dtype).removeprefix("torch."),
        quantization=setup.quantization,
        page_size=setup.page_size,
        kv_cache_dtype=setup.kv_cache_dtype,
        ranks=mesh.size,
        expert_parallel=mesh.expert_parallel,
    )
    return CheckPlan(sizes=sizes, device=str(device), table=TABLE)


def read_or_check(
    plan: CheckPlan,
    file: FindingsFile,
    *,
    again: bool = False,
    say: Say = print_line,
    limits: TimeLimits = LIMITS,
) -> Findings:
    """Return the file's findings; if there are none, check the kernels, report, write the file."""
    with file.lock(limits.everything):
        known = file.read()
        if known is not None and not again:
            return known
        say(f"kernels: checking them on {file.key['gpu']}, once; this takes up to a minute")
        found = run_check(plan, limits).model_copy(update={"key": file.key})
        for line in found.lines():
            say(line)
        if found.failed:  # the next start checks again
            file.remove()
            return found
        say(f"kernels: checked in {found.seconds:.0f} s, {len(found.refused)} refused")
        if found.short_of_memory:
            say("kernels: the next start checks again, because there was too little GPU memory")
            return found
        try:
            file.write(found)
        except OSError as error:
            say(f"kernels: the next start checks again: {file.path} cannot be written: {error}")
        return found


def key_of(plan: CheckPlan) -> dict[str, str]:
    """Return everything that the findings depend on."""
    from triton import __version__ as triton_version

    sizes = plan.sizes
    model = sizes.model()
    lines = [*shapes_of(model), str(sizes.page_size), str(sizes.quantization)]
    lines.append(sizes.kv_cache_dtype)
    return {
        **gpu_facts(torch.device(plan.device)),
        "torch": torch.__version__,
        "triton": triton_version,
        "diffray": diffray.__version__,
        "kernels": _digest_of_kernels(),
        "model": f"{model.dims.family} {sha256(repr(lines).encode()).hexdigest()[:16]}",
    }


def _digest_of_kernels() -> str:
    """Return a digest of the kernels' sources, which may change while the version does not."""
    digest = sha256()
    for file in sorted(Path(kernel.__file__).parent.rglob("*.py")):
        digest.update(file.read_bytes())
    return digest.hexdigest()[:16]
