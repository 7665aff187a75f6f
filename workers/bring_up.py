"""Finds out, once for each GPU and model shape, which variant of each kernel to run.

Another process tries them (workers/trial_process.py), so one that crashes or hangs ends nothing
else. What was found is kept on disk for the next start. No weights are needed, so this comes before
they are loaded, when memory is free.
"""

import sys
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
from diffray.components.checkpoints.checkpoint import read_config, resolve
from diffray.kernels import variants
from diffray.kernels.choose import choose_kernels
from diffray.workers.engine_options import EngineOptions
from diffray.workers.findings import Findings, FindingsFile
from diffray.workers.one_layer import Sizes, shapes_of
from diffray.workers.trial_process import Order
from diffray.workers.trials import Patience, try_kernels

TABLE = "diffray.kernels.triton.table"


def bring_up(
    model: str,
    setup: EngineOptions,
    *,
    ranks: int = 1,
    expert_parallel: bool = False,
    again: bool = False,
) -> Findings:
    """Return what is known of the kernels on this GPU; try them if nothing is, or `again`.

    Nothing is tried if the options say so, or where torch's kernels run anyway.
    """
    device = choose_device(setup.device)
    dtype = choose_dtype(setup.dtype, device)
    kernels = choose_kernels(setup.kernels, device, dtype)
    choose_quantization(setup.quantization, device)
    if device.type != "cuda" or kernels.name != "triton":
        return Findings()
    sizes = Sizes(
        config=read_config(resolve(model)),
        dtype=str(dtype).removeprefix("torch."),
        quantization=setup.quantization,
        page_size=setup.page_size,
        ranks=ranks,
        expert_parallel=expert_parallel,
    )
    graphs = choose_recorder(setup.cuda_graphs, device, kernels.name, ranks) is not None
    order = Order(sizes=sizes, device=str(device), table=TABLE, graphs=graphs)
    file = FindingsFile(key_of(order))
    if not setup.bring_up:
        return file.read() or Findings()
    return found_or_tried(order, file, again=again)


def found_or_tried(
    order: Order, file: FindingsFile, *, again: bool = False, patience: Patience | None = None
) -> Findings:
    """Return what the file holds, or try, say what will not be used, and keep what was found."""
    with file.lock():
        known = None if again else file.read()
        if known is not None:
            return known
        found = try_kernels(order, patience or Patience()).model_copy(update={"key": file.key})
        for line in found.lines():
            _say(line)
        if found.failed:  # the next start tries again
            return found
        _say(found.summary())
        try:
            file.write(found)
        except OSError as error:
            _say(f"kernels: the next start tries again, as {file.path} cannot be written: {error}")
        return found


def _say(line: str) -> None:
    print(f"diffray: {line}", file=sys.stderr, flush=True)


def key_of(order: Order) -> dict[str, str]:
    """Return all that the findings depend on."""
    from triton import __version__ as triton_version

    sizes = order.sizes
    model = sizes.model()
    lines = [*shapes_of(model), str(sizes.page_size), str(sizes.quantization)]
    return {
        **gpu_facts(torch.device(order.device)),
        "torch": torch.__version__,
        "triton": triton_version,
        "diffray": diffray.__version__,
        "kernels": _digest_of_kernels(),
        "graphs": str(order.graphs),
        "model": f"{model.dims.family} {sha256(repr(lines).encode()).hexdigest()[:16]}",
    }


def _digest_of_kernels() -> str:
    """Return a digest of the kernels' sources, which change between two versions, too."""
    digest = sha256()
    for file in sorted(Path(variants.__file__).parent.rglob("*.py")):
        digest.update(file.read_bytes())
    return digest.hexdigest()[:16]
