"""Check the engine on the GPU: golden tokens, noise, memory, and who waits for whom.

    python -m benchmarks.gpu.check_engine
    python -m benchmarks.gpu.check_engine --family llada --device cpu

It needs what the engine needs (torch, pydantic, safetensors, tqdm), and this checkout: the golden
checkpoints are in `tests/golden`. Each check prints a line, and a wrong one does not stop the
others. What is only told, as how many answers bfloat16 changes, has no verdict. Exit status 1 if
something is wrong.
"""

import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from torch import Tensor

from benchmarks.golden import EOS, FAMILIES, MASK, cases_of, golden, params_of
from benchmarks.gpu.measure import arguments, facts, need_cuda, write_report
from diffray.components.batch import Batch, Window
from diffray.components.denoiser import Denoiser
from diffray.components.mesh import Mesh
from diffray.components.params import SamplingParams
from diffray.kernels import noise
from diffray.workers.batch_plan import BatchPlan
from diffray.workers.engine import Engine
from diffray.workers.engine_options import EngineOptions
from diffray.workers.messages import Request
from diffray.workers.setup import build_rank
from tests.helpers.paths import GOLDEN

CAUSAL = "llada2_moe"  # the family whose requests share K/V
MOST_ROUNDING = 3.0  # times what rounding the weights to bfloat16 does


class Found(NamedTuple):
    """What a check found; `right` is None where there is nothing to judge."""

    right: bool | None
    told: str


class Way(NamedTuple):
    """A way to run the engine."""

    dtype: str
    kernels: str
    graphs: bool | None


def main() -> None:
    parser = arguments("Check the engine on the GPU.")
    parser.add_argument("--family", choices=FAMILIES, action="append", help="default: all")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    args = parser.parse_args()
    device = torch.device("cpu") if args.device == "cpu" else need_cuda()
    rows: list[dict[str, Any]] = []
    try:
        for name, check in checks(device, args.family or list(FAMILIES)):
            begin = time.perf_counter()
            found = judged(check)
            seconds = round(time.perf_counter() - begin, 2)
            rows.append({"check": name, **found._asdict(), "seconds": seconds})
            verdict = {True: "right", False: "WRONG", None: "told "}[found.right]
            print(f"{verdict} {name:52} {found.told} ({seconds} s)", flush=True)
    finally:
        wrong = sum(row["right"] is False for row in rows)
        write_report({"facts": facts(), "checks": rows, "wrong": wrong}, args.out)
    if wrong:
        raise SystemExit(f"{wrong} of {len(rows)} checks failed; see the lines marked WRONG")


def judged(check: Callable[[], Found]) -> Found:
    """Run a check; an error is a wrong answer, and what it says is told."""
    try:
        return check()
    except Exception as error:  # whatever is wrong with one, the others are run
        return Found(False, f"{type(error).__name__}: {' '.join(str(error).split())[:300]}")


def checks(device: torch.device, families: list[str]) -> Iterator[tuple[str, Callable[[], Found]]]:
    """Yield every check and its name, what others rely on first."""
    yield (
        "noise on the device is that on a CPU, but for the last bits",
        partial(check_noise, device),
    )
    for family in families:
        for way in ways(device):
            graphs = "" if way.graphs is None else f", graphs {'on' if way.graphs else 'off'}"
            name = f"golden {family}, {way.dtype}, {way.kernels}{graphs}"
            yield name, partial(check_golden, family, way, device)
            if family == CAUSAL:
                yield f"shared beginnings, {name}", partial(check_sharing, way, device)
        yield f"logits in bfloat16, {family}", partial(check_logits, family, device)
        yield f"batched in bfloat16 as alone, {family}", partial(compare_alone, family, device)
    yield "no step but a round's first waits", partial(check_waiting, families[0], device)
    yield "memory stays after a hundred answers", partial(check_memory, families[0], device)


def ways(device: torch.device) -> list[Way]:
    plain = [Way("float64", "torch", None), Way("float32", "torch", None)]
    if device.type == "cpu":
        return plain
    return [*plain, Way("float32", "triton", False), Way("float32", "triton", True)]


def engine_of(
    family: str, way: Way, device: torch.device, *, sharing: bool | None = None
) -> Engine:
    setup = EngineOptions(
        dtype=way.dtype,
        device=str(device),
        mask_token_id=MASK,
        eos_token_id=EOS,
        max_model_len=160,
        max_num_seqs=16,
        kernels=way.kernels,
        cuda_graphs=way.graphs,
        chunk=32,
        enable_prefix_caching=sharing,
    )
    return build_rank(str(GOLDEN / family), setup, Mesh())


def requests_of(family: str) -> list[Request]:
    """Return the family's cases; a request's number is its case's."""
    return [
        Request(
            number,
            tuple(case["prompt"]),
            params_of(case),
        )
        for number, case in enumerate(cases_of(FAMILIES[family]))
    ]


def answers(engine: Engine, requests: list[Request], steps: int = 1) -> dict[int, list[int]]:
    """Run the requests together; return the tokens of each."""
    found: dict[int, list[int]] = {request.uid: [] for request in requests}
    for request in requests:
        engine.add(request)
    while not engine.idle:
        for update in engine.step(steps):
            found[update.uid] += update.ids
    return found


def check_noise(device: torch.device) -> Found:
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
    # Both compute logarithms in float64, each with a last bit of its own.
    count = int((here_RV != there_RV).sum())
    return Found(keys and near, f"keys equal: {keys}; {count} of {here_RV.numel()} differ at all")


def check_golden(family: str, way: Way, device: torch.device) -> Found:
    """All cases in batches, then again in rounds of several steps."""
    engine = engine_of(family, way, device)
    cases, requests = cases_of(FAMILIES[family]), requests_of(family)
    equal = []
    for steps in (1, 4):
        found = answers(engine, requests, steps)
        equal.append(sum(found[n] == case["tokens"] for n, case in enumerate(cases)))
    recorded = "" if engine.graphs is None else ", recorded"
    return Found(
        equal == [len(cases)] * 2,
        f"{equal[0]} and {equal[1]} of {len(cases)} equal at 1 and 4 steps{recorded}",
    )


def check_sharing(way: Way, device: torch.device) -> Found:
    """Some come together, so one reads what another stores in the same forward; others later."""
    draw = torch.Generator().manual_seed(0)
    ids = torch.randint(0, 500, (120,), generator=draw).tolist()
    prompts = [ids[:100], ids[:100], ids[:40], ids, ids[:80] + ids[:20]]
    diffusion = {"block_length": 8, "decoder": {"kind": "threshold", "threshold": 0.1}}
    params = SamplingParams(max_tokens=24, ignore_eos=True, diffusion=diffusion)
    requests = [Request(uid, tuple(prompt), params) for uid, prompt in enumerate(prompts)]
    found = []
    for sharing in (None, False):
        engine = engine_of(CAUSAL, way, device, sharing=sharing)
        found.append([answers(engine, requests, steps) for steps in (1, 4)])
        idle = engine.kv.prefixes.num_idle
        assert (idle == 0) == (sharing is False), f"{idle} pages are kept"
    equal = sum(
        one[request.uid] == other[request.uid]
        for one, other in zip(*found, strict=True)
        for request in requests
    )
    told = f"{equal} of {2 * len(requests)} answers as without sharing"
    return Found(equal == 2 * len(requests), told)


def check_logits(family: str, device: torch.device) -> Found:
    """The yardstick is what rounding the weights does: random ones make much of a little."""
    case = golden(FAMILIES[family])["full_forward"]
    ids, block = case["input_ids"], case.get("block_length", 0)
    kernels = "torch" if device.type == "cpu" else "triton"
    engine = engine_of(family, Way("float64", "torch", None), device)
    assert isinstance(engine.model, Denoiser)
    exact = full_logits(engine, ids, block)
    with torch.inference_mode():
        for weights in engine.model.parameters():
            weights.copy_(weights.bfloat16())
    rounded = full_logits(engine, ids, block)
    narrow = full_logits(engine_of(family, Way("bfloat16", kernels, False), device), ids, block)
    error, yardstick = (
        float((logits.double() - exact).norm() / exact.norm()) for logits in (narrow, rounded)
    )
    told = f"{error:.1e} from float64; with the weights alone rounded {yardstick:.1e}"
    return Found(error < MOST_ROUNDING * yardstick, told)


@torch.inference_mode()
def full_logits(engine: Engine, ids: list[int], block: int) -> Tensor:
    """Return the logits of all positions of one sequence."""
    kv, length = engine.kv, len(ids)
    pages = kv.allocate(kv.pages_for(length))
    window = Window(0, length, length, block, torch.tensor(pages))
    batch = Batch.pack([window], engine.slots.device, kv.page_size)
    hidden_TH = engine.model.forward(
        engine.model.embed(torch.tensor(ids).to(engine.slots.device)), batch, kv
    )
    kv.free(pages)
    return engine.model.head(hidden_TH)


def compare_alone(family: str, device: torch.device) -> Found:
    kernels = "torch" if device.type == "cpu" else "triton"
    engine = engine_of(family, Way("bfloat16", kernels, None), device)
    requests = requests_of(family)
    together = answers(engine, requests)
    alone = sum(answers(engine, [r])[r.uid] == together[r.uid] for r in requests[:8])
    return Found(None, f"{alone} of {len(requests[:8])} answers have the same tokens")


def check_waiting(family: str, device: torch.device) -> Found:
    """Steps after a round's first enqueue work and ask the device for nothing."""
    if device.type == "cpu":
        return Found(None, "nothing to wait for on a CPU")
    engine = engine_of(family, Way("float32", "triton", None), device)
    requests = requests_of(family)
    answers(engine, requests[:4], 4)  # kernels are compiled
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
    return Found(watched > 0, f"{watched} steps watched")


def check_memory(family: str, device: torch.device) -> Found:
    if device.type == "cpu":
        return Found(None, "measured on a CUDA device alone")
    engine = engine_of(family, Way("bfloat16", "triton", None), device)
    held = []
    for _ in range(3):
        for request in [*requests_of(family)] * 3:
            answers(engine, [request])
        torch.cuda.synchronize()
        held.append(torch.cuda.memory_allocated())
    free, total = torch.cuda.mem_get_info()
    return Found(
        held[1] == held[2],
        f"{held[2] - held[1]} bytes more; {(total - free) / 2**30:.1f} GiB of the device in use",
    )


if __name__ == "__main__":
    main()
