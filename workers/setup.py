"""Makes a checkpoint into a ready engine: weights, tokenizer, K/V memory."""

from collections.abc import Sequence as Items

import torch

from diffray.components.backend import (
    choose_device,
    choose_dtype,
    choose_recorder,
    free_memory,
    keep_freed_memory,
    make_current,
    overhead_positions,
    threads_for,
    use_threads,
)
from diffray.components.checkpoints.checkpoint import load_model
from diffray.components.checkpoints.folder import read_config, resolve
from diffray.components.checkpoints.special_tokens import NO_MASK, special_ids
from diffray.components.denoiser import Denoiser
from diffray.components.kv_pool import KVPool, Sharing, kv_format
from diffray.components.mesh import Mesh
from diffray.components.models.registry import build_model, check_sharing, kernels_for
from diffray.kernels.choose import TORCH
from diffray.kernels.verify import one_line
from diffray.workers.adapters import Adapters
from diffray.workers.bring_up.findings import Findings
from diffray.workers.bring_up.start import bring_up
from diffray.workers.changes import Changes
from diffray.workers.engine import Engine
from diffray.workers.engine_options import EngineOptions
from diffray.workers.full_batch import try_full_batch
from diffray.workers.graphs import Graphs, buckets_of, memory_for
from diffray.workers.kv_room import kv_room, page_bytes
from diffray.workers.prefix_memory import host_pages_for
from diffray.workers.sleeper import Sleeper
from diffray.workers.slots import Slots

# Inputs of soft requests take at most this share of the K/V memory's size, in addition to it. Half
# is for the copy that is made whenever a soft request starts or ends.
_SHARE_FOR_SOFT = 1 / 8


def build_engine(model: str, setup: EngineOptions, mesh: Mesh | None = None) -> Engine:
    """Load a checkpoint and return its engine."""
    use_threads(setup.cpu_threads)
    mesh = mesh or Mesh()
    return build_rank(model, setup, mesh, bring_up(model, setup, mesh))


def build_rank(
    model: str, setup: EngineOptions, mesh: Mesh, findings: Findings | None = None
) -> Engine:
    """Load a rank's share of a checkpoint and return its engine.

    All ranks of a mesh do this with the same findings, each at its own pace, and then agree on the
    number of K/V pages.
    """
    findings = findings or Findings()
    setup = findings.applied_to(setup)
    path = resolve(model)
    config = read_config(path)
    spec = build_model(config, Mesh(), torch.float32).spec
    mask_token_id, eos_token_ids = special_ids(
        path,
        config,
        mask_token_id=setup.mask_token_id,
        eos_token_id=setup.eos_token_id,
        masked=spec.masked,
    )
    device = _device_for(setup, mesh)
    # Refuse unsupported options before anything is loaded.
    check_sharing(config, setup.prefix_options, setup.first_step_caching)
    kv_format(setup.kv_cache_dtype, spec.kv_shapes)
    dtype = choose_dtype(setup.dtype, device)
    kernels = kernels_for(config, setup.kernels, device, dtype, findings.refused.keys())
    choose_recorder(setup.cuda_graphs, device, kernels.name)
    loaded = load_model(
        path,
        dtype=setup.dtype,
        device=str(device),
        mesh=mesh,
        progress=mesh.rank == 0,
        kernels=setup.kernels,
        refused=findings.refused.keys(),
        quantization=setup.quantization,
    )
    if kernels.name == TORCH.name:  # Triton's read the head as it is
        loaded.pack()
    _check_special_ids(mask_token_id, eos_token_ids, spec.vocab_size)
    engine = engine_of(loaded, setup, mask_token_id, eos_token_ids, mesh)
    plan = build_model(config, mesh, loaded.dtype, kernels)
    adapters = Adapters(loaded, plan, mesh, setup.max_loras, setup.max_lora_rank)
    sleeper = Sleeper(loaded, engine.kv, engine.graphs, adapters)
    engine.changes = Changes(
        loaded,
        plan,
        config,
        engine.kv,
        mesh,
        first=path,
        sleeper=sleeper,
        received=setup.received_weights,
    )
    engine.adapters, engine.drafter = adapters, adapters.enter_drafter(path)
    if device.type == "cuda":
        try_full_batch(engine)
    return engine


def _device_for(setup: EngineOptions, mesh: Mesh) -> torch.device:
    """Return the device of this process, and prepare the process for it."""
    device = mesh.device or choose_device(setup.device)
    if setup.device not in ("auto", str(device), device.type):
        raise ValueError(f"device is {setup.device!r}, but the ranks were connected for {device}")
    if device.type == "cpu":
        keep_freed_memory()
    make_current(device)
    return device


def _check_special_ids(mask_token_id: int, eos_token_ids: Items[int], vocab_size: int) -> None:
    for name, token_id in (("mask", mask_token_id), *(("eos", e) for e in eos_token_ids)):
        if token_id != NO_MASK and not 0 <= token_id < vocab_size:
            raise ValueError(
                f"{name} token id {token_id} is not in the vocabulary (0 to {vocab_size - 1})"
            )


def engine_of(
    loaded: Denoiser,
    setup: EngineOptions,
    mask_token_id: int,
    eos_token_ids: Items[int],
    mesh: Mesh,
) -> Engine:
    """Give a model its canvases and K/V memory, and record the steps to replay."""
    spec = loaded.spec
    length = spec.context(setup.max_model_len)
    slots = Slots(
        setup.max_num_seqs, length, mask_token_id, loaded.device, vocab_size=spec.vocab_size
    )
    record = choose_recorder(setup.cuda_graphs, loaded.device, loaded.kernels.name)
    buckets = buckets_of(spec, setup)
    if record is not None:
        mesh.smallest("loaded", 1)  # recordings hold collectives, and others may still be loading
    reserved = (
        0 if record is None else memory_for(buckets[0], loaded, _pool(loaded, setup, 1), slots)
    )
    # This is not a collective: other ranks may still be loading.
    pages = mesh.smallest("K/V pages", _num_pages(loaded, setup, length, mesh, reserved))
    kv, graphs = _pool(loaded, setup, pages), None
    row = spec.hidden_size * loaded.dtype.itemsize
    rows = int(kv.nbytes * _SHARE_FOR_SOFT / 2 / row)
    slots.soft.most_rows = max(rows, length)
    if record is not None:
        hint = "start with --no-cuda-graphs (cuda_graphs: false)"
        try:
            graphs = Graphs(loaded, kv, slots, buckets, record, progress=mesh.rank == 0)
        except Exception as failure:  # torch's, or a compiler's
            what = f"no CUDA graph can be recorded here ({one_line(failure)})"
            raise RuntimeError(f"{what}; {hint}") from failure
        wrong = graphs.wrong()
        if not mesh.smallest("replays", int(not wrong)):
            raise RuntimeError(f"CUDA graphs: {wrong or 'another rank refuses them'}; {hint}")
    weights, threads = loaded.num_weights, None
    if loaded.device.type == "cpu" and setup.cpu_threads is None:
        # Ranks must split sums alike.
        threads = mesh.smallest("threads", min(threads_for(weights), torch.get_num_threads()))
    overhead = overhead_positions(loaded.device, weights, in_blocks=loaded.in_blocks)
    overhead = mesh.smallest("draft_overhead", overhead)
    return Engine(
        loaded,
        kv,
        slots,
        eos_token_ids=eos_token_ids,
        mesh=mesh,
        chunk=setup.chunk,
        graphs=graphs,
        threads=threads,
        draft_overhead=overhead if setup.draft_overhead is None else setup.draft_overhead,
    )


def _pool(model: Denoiser, setup: EngineOptions, num_pages: int) -> KVPool:
    shapes = model.spec.kv_shapes
    page = page_bytes(model.spec, model.dtype, setup)
    return KVPool(
        shapes=shapes,
        num_pages=num_pages,
        page_size=setup.page_size,
        dtype=model.dtype,
        device=model.device,
        form=kv_format(setup.kv_cache_dtype, shapes),
        kernels=model.kernels,
        sharing=Sharing(
            prefixes=setup.enable_prefix_caching is not False,
            host_pages=host_pages_for(setup.swap_space, page) if num_pages > 1 else 0,
            ttl=setup.prefix_cache_ttl,
            first_steps=setup.first_step_caching,
        ),
    )


def _num_pages(
    model: Denoiser, setup: EngineOptions, length: int, mesh: Mesh, reserved: int
) -> int:
    """Return how many pages this rank has memory for.

    `reserved` bytes are kept for recordings that are made later.
    """
    # On a CPU the ranks may all share this machine's memory.
    ranks = mesh.size if model.device.type == "cpu" else 1
    page = page_bytes(model.spec, model.dtype, setup)
    room = kv_room(free_memory(model.device) - reserved, page, setup, length, ranks)
    if room.num_pages < 2:
        raise ValueError(
            f"{room.memory} bytes hold no K/V page of {page} bytes; raise kv_cache_memory"
        )
    return room.num_pages
