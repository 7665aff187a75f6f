"""Check the engine on the GPU: golden tokens, noise, memory, graphs, and waiting for the device.

    python -m benchmarks.gpu.check_engine
    python -m benchmarks.gpu.check_engine --family llada --device cpu

The golden checkpoints are in `tests/golden`. Some checks only report, such as how many answers
bfloat16 changes, and have no verdict. The exit status is 1 if something is wrong.
"""

import argparse
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from torch import Tensor

from benchmarks.golden import EOS, FAMILIES, MASK, MASKED, cases_of, golden, params_of
from benchmarks.gpu.engine import replays
from benchmarks.gpu.program import Row, arguments, run
from benchmarks.random_checkpoint import GOLDEN
from diffray.components.batch import Batch, Window
from diffray.components.denoiser import Denoiser
from diffray.components.mesh import Mesh
from diffray.components.params import SamplingParams
from diffray.kernels import noise
from diffray.workers.batch_plan import BatchPlan
from diffray.workers.engine import Engine
from diffray.workers.engine_options import EngineOptions
from diffray.workers.graphs import Bucket, Graphs, run_again
from diffray.workers.messages import Request
from diffray.workers.setup import build_rank

CAUSAL = "llada2_moe"  # the family whose requests share K/V
SHORT = ("dual", "vicinity", "block")  # the golden caches whose windows fit the recordings
MOST_ROUNDING = 3.0  # times the error of rounding only the weights to bfloat16


class Way(NamedTuple):
    """A way to run the engine."""

    dtype: str
    kernels: str
    graphs: bool | None

    def __str__(self) -> str:
        graphs = "" if self.graphs is None else f", graphs {'on' if self.graphs else 'off'}"
        return f"{self.dtype}, {self.kernels}{graphs}"


def main() -> None:
    parser = arguments("Check the engine on the GPU.")
    parser.add_argument(
        "--family", choices=FAMILIES, nargs="+", help="default: all that denoise masks"
    )
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    run(plan, parser.parse_args(), lambda row: str(row["told"]))


def judged(right: bool | None, told: str) -> Row:
    """Return a check's row; `right` is None if there is nothing to judge."""
    return {"right": right, "told": told}


def plan(args: argparse.Namespace) -> dict[str, Callable[[], Row]]:
    """Return every check by name; what only a GPU can tell comes first, golden tokens last."""
    device = torch.device(args.device)
    families = args.family or [name for name, weights in FAMILIES.items() if weights in MASKED]
    first = families[0]
    every: dict[str, Callable[[], Row]] = {
        f"graphs in bfloat16, {first}": partial(check_graphs, first, device),
        "no step but a round's first waits": partial(check_waiting, first, device),
        "memory stays after a hundred answers": partial(check_memory, first, device),
        "noise on the device as on a CPU, except for last bits": partial(check_noise, device),
    }
    for family in families:
        every[f"logits in bfloat16, {family}"] = partial(check_logits, family, device)
        every[f"graphs in bfloat16, {family}"] = partial(check_graphs, family, device)
        every[f"batched in bfloat16 as alone, {family}"] = partial(compare_alone, family, device)
    for family in families:
        for way in reversed(ways(device)):
            every[f"golden {family}, {way}"] = partial(check_golden, family, way, device)
            if family == CAUSAL:
                every[f"shared prefixes, {family}, {way}"] = partial(check_sharing, way, device)
    return every


def ways(device: torch.device) -> list[Way]:
    plain = [Way("float64", "torch", None), Way("float32", "torch", None)]
    if device.type == "cpu":
        return plain
    return [*plain, *(Way("float32", "triton", graphs) for graphs in (False, True))]


def engine_of(
    family: str,
    way: Way,
    device: torch.device,
    *,
    sharing: bool | None = None,
    graph_length: int | None = None,
) -> Engine:
    """Return a golden model's engine; without a GPU a stand-in records graphs."""
    stand_in = bool(way.graphs) and device.type == "cpu"
    setup = EngineOptions(
        dtype=way.dtype,
        device=str(device),
        mask_token_id=MASK,
        eos_token_id=EOS,
        max_model_len=192,  # the longest cases need it
        max_num_seqs=16,
        kernels=way.kernels,
        cuda_graphs=False if stand_in else way.graphs,
        graph_block_length=graph_length,
        chunk=32,
        enable_prefix_caching=sharing,
    )
    engine = build_rank(str(GOLDEN / family), setup, Mesh())
    if stand_in:
        length = graph_length or engine.model.spec.block_length
        buckets = [Bucket(windows, length) for windows in (16, 4, 1)]
        engine.graphs = Graphs(engine.model, engine.kv, engine.slots, buckets, run_again)
    return engine


def requests_of(family: str) -> list[Request]:
    """Return the family's cases; a request's number is its case's."""
    cases = enumerate(cases_of(FAMILIES[family]))
    return [Request(number, tuple(case["prompt"]), params_of(case)) for number, case in cases]


def answers(engine: Engine, requests: list[Request], steps: int = 1) -> dict[int, list[int]]:
    """Run the requests together; return the tokens of each."""
    found: dict[int, list[int]] = {request.uid: [] for request in requests}
    for request in requests:
        engine.add(request)
    while not engine.idle:
        for update in engine.step(steps):
            found[update.uid] += update.ids
    return found


def check_noise(device: torch.device) -> Row:
    draw = torch.Generator().manual_seed(0)
    seeds, positions, steps = (
        torch.randint(0, 1 << bits, (64,), generator=draw) for bits in (62, 15, 10)
    )
    ids = torch.arange(5000)
    here_RV = noise.gumbel(seeds, positions, steps, ids)
    keys_R = noise.key(seeds, positions, steps)
    seeds, positions, steps, ids = (part.to(device) for part in (seeds, positions, steps, ids))
    there_RV = noise.gumbel(seeds, positions, steps, ids).cpu()
    keys = torch.equal(keys_R, noise.key(seeds, positions, steps).cpu())
    near = torch.allclose(here_RV, there_RV, rtol=1e-12, atol=1e-12)
    # Both compute logarithms in float64, which may differ in the last bit.
    count = int((here_RV != there_RV).sum())
    return judged(keys and near, f"keys equal: {keys}; {count} of {here_RV.numel()} differ at all")


def check_golden(family: str, way: Way, device: torch.device) -> Row:
    """Run all cases in batches, first in rounds of one step, then of several."""
    engine = engine_of(family, way, device)
    cases, requests = cases_of(FAMILIES[family]), requests_of(family)
    equal = []
    for steps in (1, 4):
        found = answers(engine, requests, steps)
        equal.append(sum(found[n] == case["tokens"] for n, case in enumerate(cases)))
    recorded = "" if engine.graphs is None else ", recorded"
    told = f"{equal[0]} and {equal[1]} of {len(cases)} equal at 1 and 4 steps{recorded}"
    return judged(equal == [len(cases)] * 2, told)


def check_sharing(way: Way, device: torch.device) -> Row:
    """Let requests read K/V that others store, in the same forward or earlier ones."""
    draw = torch.Generator().manual_seed(0)
    ids = torch.randint(0, 500, (120,), generator=draw).tolist()
    prompts = [ids[:100], ids[:100], ids[:40], ids, ids[:80] + ids[:20]]
    diffusion = {"block_length": 8, "decoder": {"kind": "threshold", "threshold": 0.1}}
    params = SamplingParams(max_tokens=24, ignore_eos=True, diffusion=diffusion)
    requests = [Request(uid, tuple(prompt), params) for uid, prompt in enumerate(prompts)]
    tokens = []
    for sharing in (None, False):
        engine = engine_of(CAUSAL, way, device, sharing=sharing)
        tokens.append([answers(engine, requests, steps) for steps in (1, 4)])
        idle = engine.kv.prefixes.num_idle
        assert (idle == 0) == (sharing is False), f"{idle} pages are kept"
    pairs = [*zip(*tokens, strict=True)]
    equal = sum(one[r.uid] == other[r.uid] for one, other in pairs for r in requests)
    told = f"{equal} of {2 * len(requests)} answers as without sharing"
    return judged(equal == 2 * len(requests), told)


def check_logits(family: str, device: torch.device) -> Row:
    """Compare with the error of rounding the weights: random weights amplify small errors."""
    case = golden(FAMILIES[family])["full_forward"]
    ids, block = case["input_ids"], case.get("block_length", 0)
    engine = engine_of(family, Way("float64", "torch", None), device)
    assert isinstance(engine.model, Denoiser)
    exact = full_logits(engine, ids, block)
    with torch.inference_mode():
        for weights in engine.model.parameters():
            weights.copy_(weights.bfloat16())
    yardstick = distance(full_logits(engine, ids, block), exact)
    errors = []
    for graphs in (False, True):
        engine = engine_of(family, narrow(device, graphs), device, graph_length=len(ids))
        errors.append(distance(full_logits(engine, ids, block), exact))
    told = "{:.1e} from float64, replayed {:.1e}; with the weights alone rounded {:.1e}"
    # NaN fails this comparison.
    right = all(error < MOST_ROUNDING * yardstick for error in errors)
    return judged(right, told.format(*errors, yardstick))


def narrow(device: torch.device, graphs: bool | None) -> Way:
    return Way("bfloat16", "torch" if device.type == "cpu" else "triton", graphs)


def distance(logits: Tensor, exact: Tensor) -> float:
    return float((logits.double() - exact).norm() / exact.norm())


@torch.inference_mode()
def full_logits(engine: Engine, ids: list[int], block: int) -> Tensor:
    """Return the logits of all positions of one sequence, from a recording if graphs are on."""
    kv, length, cells = engine.kv, len(ids), engine.slots.ids_SN
    pages = kv.allocate(kv.pages_for(length))
    window = Window(0, length, length, block, torch.tensor(pages))
    if engine.graphs is not None:
        recorded = engine.graphs.fit(1, length)
        assert recorded is not None, "no recording is long enough"
        cells[0, :length] = torch.tensor(ids).to(cells)
        recorded.fill([window])
        hidden_TH = recorded.forward()[:length]
    else:
        batch = Batch.pack([window], cells.device, kv.page_size)
        hidden_TH = engine.model.forward(
            engine.model.embed(torch.tensor(ids).to(cells.device)), batch, kv
        )
    kv.free(pages)
    return engine.model.head(hidden_TH)


def check_graphs(family: str, device: torch.device) -> Row:
    """Judge only replays: padding may change the last bits, so tokens in bfloat16 may differ."""
    cases, tokens = cases_of(FAMILIES[family]), []
    short = [n for n, c in enumerate(cases) if c["cache"] in SHORT and c.get("iteration") != "soft"]
    requests = [requests_of(family)[number] for number in short[:8]]
    for graphs in (False, True):
        engine = engine_of(family, narrow(device, graphs), device)
        with replays() as seen:
            tokens.append(answers(engine, requests))
    equal = sum(tokens[0][r.uid] == tokens[1][r.uid] for r in requests)
    told = f"{len(seen)} of {engine.forwards} forwards replayed; {equal} of {len(requests)} answers"
    return judged(0 < len(seen) <= engine.forwards, f"{told} have the same tokens")


def compare_alone(family: str, device: torch.device) -> Row:
    engine = engine_of(family, narrow(device, None), device)
    requests = requests_of(family)
    together = answers(engine, requests)
    alone = sum(answers(engine, [r])[r.uid] == together[r.uid] for r in requests[:8])
    return judged(None, f"{alone} of {len(requests[:8])} answers have the same tokens")


def check_waiting(family: str, device: torch.device) -> Row:
    """Check that steps after a round's first only enqueue work, without waiting for the device."""
    if device.type == "cpu":
        return judged(None, "nothing to wait for on a CPU")
    engine = engine_of(family, Way("float32", "triton", None), device)
    requests = requests_of(family)
    answers(engine, requests[:4], 4)  # compiles kernels
    denoise, watched = BatchPlan.denoise, 0

    def strict(rounds: BatchPlan, step: int, chunks: Any) -> None:
        nonlocal watched
        torch.cuda.set_sync_debug_mode("error" if step else "default")
        try:
            denoise(rounds, step, chunks)
            watched += bool(step)
        finally:
            torch.cuda.set_sync_debug_mode("default")

    with patch.object(BatchPlan, "denoise", strict):
        answers(engine, requests, 4)
    return judged(watched > 0, f"{watched} steps watched")


def check_memory(family: str, device: torch.device) -> Row:
    if device.type == "cpu":
        return judged(None, "measured only on a CUDA device")
    engine = engine_of(family, Way("bfloat16", "triton", None), device)
    held = []
    for _ in range(3):
        for request in requests_of(family)[:34]:
            answers(engine, [request])
        torch.cuda.synchronize()
        held.append(torch.cuda.memory_allocated())
    free, total = torch.cuda.mem_get_info()
    used = f"{(total - free) / 2**30:.1f} GiB of the device in use"
    return judged(held[1] == held[2], f"{held[2] - held[1]} bytes more; {used}")


if __name__ == "__main__":
    main()
