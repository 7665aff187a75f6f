"""What two ranks do in tests/workers/test_sum_trial.py: they try sums, and generate with them.

The functions are importable by name, because processes that are started anew must find them.
"""

import os
from collections.abc import Sequence as Items
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from diffray import SamplingParams
from diffray.components import mesh as meshes
from diffray.components.mesh import Mesh
from diffray.kernels.trial import Outcome
from diffray.kernels.variants import Shape
from diffray.workers.bring_up.findings import Findings, FindingsFile, GraphsOutcome, SumsOutcome
from diffray.workers.bring_up.one_layer import Sizes
from diffray.workers.bring_up.start import with_group
from diffray.workers.bring_up.sum_trial import GroupOutcome, try_together, use_one_shot
from diffray.workers.bring_up.trial_process import TrialPlan
from diffray.workers.engine_options import EngineOptions
from diffray.workers.messages import Request
from diffray.workers.setup import build_rank
from tests.helpers import stand_in_sums
from tests.helpers.tiny_checkpoints import LLADA_MOE
from tests.helpers.toy import prompt_of, run

STAND_INS, RECORDERS = "tests.helpers.stand_in_sums", "tests.helpers.stand_in_recorders"
KEY = {"gpu": "Test"}


def tried(mesh: Mesh, names: Items[str], patience_s: float) -> list[SumsOutcome]:
    """Return the outcome of each stand-in on this rank."""
    return [
        try_together(mesh, "float32", opener=f"{STAND_INS}:{name}", patience_s=patience_s).sums
        for name in names
    ]


STEPS = TrialPlan(
    sizes=Sizes(config=LLADA_MOE, dtype="float32", ranks=2),
    device="cpu",
    table=RECORDERS,
    graphs=True,
    done=(Outcome("rms_norm", Shape((32, "torch.float32"), (8,)), "launched", launched_s=1e-6),),
)


def recorded(mesh: Mesh, names: Items[str], patience_s: float) -> list[GroupOutcome]:
    """Return the outcome on this rank of each recorder that stands in for CUDA graphs'."""
    return [
        try_together(
            mesh,
            "float32",
            steps=STEPS,
            opener=f"{STAND_INS}:absent_on_rank_1",
            recorder=f"{RECORDERS}:{name}",
            patience_s=patience_s,
        )
        for name in names
    ]


class Kept(NamedTuple):
    """The findings on this rank, the lines that it printed, and the findings on disk."""

    found: Findings
    said: list[str]
    kept: Findings | None


def kept(mesh: Mesh, cache: Path, name: str, *, is_kept: bool) -> Kept:
    os.environ["XDG_CACHE_HOME"] = str(cache)
    said: list[str] = []
    known = Findings(key=KEY, graphs=GraphsOutcome("", 2.0, 1.0), outcomes=STEPS.done)
    if mesh.rank == 0 and is_kept:
        FindingsFile(KEY).write(known)
    found = with_group(
        known,
        mesh,
        STEPS,
        say=said.append,
        opener=f"{STAND_INS}:absent_on_rank_1",
        recorder=f"{RECORDERS}:{name}",
        patience_s=120,
    )
    mesh.smallest("written", 1)
    return Kept(found, said, FindingsFile(KEY).read())


class Generated(NamedTuple):
    """Tokens, and the shapes of the sums behind them, in their order."""

    tokens: dict[int, list[int]]
    one_shot: list[tuple[int, ...]]
    group: list[tuple[int, ...]]
    said: list[str]


def generated(mesh: Mesh, model: str, most_bytes: int, opener: str) -> Generated:
    """Generate with sums in one shot up to this size."""
    found = Generated({}, [], [], [])
    plain = Mesh.all_reduce

    def noted_sum(of: Mesh, x: Tensor) -> Tensor:
        found.one_shot.append(tuple(x.shape))
        return stand_in_sums.sum_of(of, x)

    def noted(self: Mesh, x: Tensor) -> Tensor:
        if self.one_shot is None or not self.one_shot.fits(x):
            found.group.append(tuple(x.shape))
        return plain(self, x)

    Mesh.all_reduce = noted  # type: ignore[method-assign]  # in this process alone
    if not opener:
        meshes.open_one_shot = lambda mesh, *_: lambda x: noted_sum(mesh, x)
        opener = "diffray.components.mesh:open_one_shot"
    sums = SumsOutcome(most_bytes=most_bytes, dtype="float64")
    mesh = use_one_shot(mesh, sums, found.said.append, opener=opener)
    options = EngineOptions(
        dtype="float64", device="cpu", mask_token_id=510, eos_token_id=511, max_num_seqs=2,
        max_model_len=96,
    )  # fmt: skip
    params = SamplingParams(max_tokens=16, ignore_eos=True, diffusion={"block_length": 8})
    requests = [Request(uid, prompt_of(5 + 3 * uid), params) for uid in range(3)]
    engine = build_rank(model, options, mesh)
    return found._replace(tokens=run(engine, requests))


def alone(model: str) -> dict[int, list[int]]:
    return generated(Mesh(device=torch.device("cpu")), model, 0, "").tokens
