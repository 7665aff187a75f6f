"""Finds out, once for each GPU and model shape, which variant of each kernel to run.

Another process tries the variants (trial_process.py), so one that crashes or hangs does no other
harm. The findings are stored on disk for the next start. No weights are needed, so this runs before
they are loaded, while memory is free.
"""

import sys
from collections.abc import Callable
from contextlib import suppress
from hashlib import sha256
from pathlib import Path

import torch

import diffray
from diffray.components.backend import (
    choose_device,
    choose_dtype,
    choose_quantization,
    choose_recorder,
    gpu_facts,
)
from diffray.components.checkpoints.folder import read_config, resolve
from diffray.components.mesh import Mesh
from diffray.components.models.registry import kernels_for
from diffray.kernels import flashinfer_experts, variants
from diffray.workers.bring_up.findings import Findings, FindingsFile
from diffray.workers.bring_up.one_layer import Sizes, shapes_of
from diffray.workers.bring_up.sum_trial import OPENER, PATIENCE_S, RECORDER, try_together
from diffray.workers.bring_up.trial_process import TrialPlan
from diffray.workers.bring_up.trials import BEFORE_THE_GROUP, TimeLimits, run_trials
from diffray.workers.engine_options import EngineOptions

TABLE = "diffray.kernels.triton.table"

Say = Callable[[str], None]


def print_line(line: str) -> None:
    print(f"diffray: {line}", file=sys.stderr, flush=True)


def bring_up(
    model: str, setup: EngineOptions, mesh: Mesh, *, again: bool = False, say: Say = print_line
) -> Findings:
    """Return the findings about the kernels on this GPU; try them if there are none, or if `again`.

    All ranks of a mesh must call this. Rank 0 tries its shard, and the others get its findings; all
    ranks try together what needs several.
    """
    found = from_rank_0(mesh, lambda: _bring_up(model, setup, mesh, again, say))
    if mesh.group is None or found.failed or found.sums is not None:
        return found
    plan = _plan_of(model, setup, mesh)
    if plan is None:
        return found
    if not setup.bring_up or not found.key:
        if plan.graphs and setup.cuda_graphs is None and mesh.rank == 0:
            say("cuda_graphs: off: the ranks have not tried them together")
        return found
    return with_group(found, mesh, plan, say=say)


def with_group(
    found: Findings,
    mesh: Mesh,
    plan: TrialPlan,
    *,
    say: Say = print_line,
    opener: str = OPENER,
    recorder: str = RECORDER,
    patience_s: float = PATIENCE_S,
) -> Findings:
    """Return the findings with what all ranks find together; rank 0 stores them.

    If steps can be recorded without collectives, they are also recorded with them.
    """
    graphs = found.graphs is not None and not found.graphs.refused
    steps = plan.model_copy(update={"done": found.outcomes, "device": str(mesh.device)})
    sums, recorded = try_together(
        mesh,
        plan.sizes.dtype,
        steps=steps if graphs else None,
        selection=found.selection,
        opener=opener,
        recorder=recorder,
        patience_s=patience_s,
    )
    before = found
    found = found.model_copy(update={"sums": sums, "graphs": recorded or found.graphs})
    if sums.refused:
        say(f"all-reduce: one-shot sums are off: {sums.refused}")
    if recorded is not None and recorded.refused:
        say(f"cuda_graphs: off: {recorded.refused}")
    if mesh.rank == 0:
        file = FindingsFile(found.key)
        with suppress(OSError):  # the next start tries again
            if file.read() == before:  # otherwise these findings were not meant to be stored
                file.write(found)
    return found


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
    limits = TimeLimits() if mesh.group is None else BEFORE_THE_GROUP
    return read_or_try(plan, file, again=again, say=say, limits=limits)


def _plan_of(model: str, setup: EngineOptions, mesh: Mesh) -> TrialPlan | None:
    """Return what to try on a rank's device; None if there are no variants to choose from."""
    device = mesh.device or choose_device(setup.device)
    if device.type != "cuda":
        return None
    dtype = choose_dtype(setup.dtype, device)
    config = read_config(resolve(model))
    kernels = kernels_for(config, setup.kernels, device, dtype)
    choose_quantization(setup.quantization, device)
    record = choose_recorder(setup.cuda_graphs, device, kernels.name)
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
    graphs = record is not None
    return TrialPlan(sizes=sizes, device=str(device), table=TABLE, graphs=graphs)


def read_or_try(
    plan: TrialPlan,
    file: FindingsFile,
    *,
    again: bool = False,
    say: Say = print_line,
    limits: TimeLimits | None = None,
) -> Findings:
    """Return the file's findings; if there are none, try the variants, report, and write the file.

    If an earlier start had no time for all variants, this one continues with the rest.
    """
    limits = limits or TimeLimits()
    with file.lock(limits.limit):
        known = file.read()
        if known is not None and known.cut_off:
            plan = plan.model_copy(update={"done": known.outcomes})
        elif known is not None and not again:
            return known
        say(f"kernels: trying their variants on {file.key['gpu']}, once; this takes up to a minute")
        found = run_trials(plan, limits).model_copy(update={"key": file.key})
        for line in found.lines():
            say(line)
        if found.failed and not found.cut_off:  # the next start tries again
            file.remove()
            return found
        if not found.failed:
            say(found.summary())
        if found.short_of_memory:
            say("kernels: the next start tries again, because some variants ran out of GPU memory")
            return found
        try:
            file.write(found)
        except OSError as error:
            say(f"kernels: the next start tries again: {file.path} cannot be written: {error}")
        return found


def key_of(plan: TrialPlan) -> dict[str, str]:
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
        "flashinfer": flashinfer_experts.installed_version(),
        "diffray": diffray.__version__,
        "kernels": _digest_of_kernels(),
        "graphs": str(plan.graphs),
        "model": f"{model.dims.family} {sha256(repr(lines).encode()).hexdigest()[:16]}",
    }


def _digest_of_kernels() -> str:
    """Return a digest of the kernels' sources, which may change while the version does not."""
    digest = sha256()
    for file in sorted(Path(variants.__file__).parent.rglob("*.py")):
        digest.update(file.read_bytes())
    return digest.hexdigest()[:16]
