"""However the golden requests of a family are run, they find the same tokens: one row a family."""

from collections.abc import Iterable
from dataclasses import replace
from functools import cache, partial
from typing import Any, NamedTuple

import pytest

from benchmarks.golden import EOS, MASK, cases_of, golden, images_of, params_of
from diffray.components.mesh import Mesh
from diffray.workers.engine import Engine
from diffray.workers.engine_options import EngineOptions
from diffray.workers.messages import Request, Update
from diffray.workers.setup import build_rank
from tests.helpers import rank_cases
from tests.helpers.paths import GOLDEN
from tests.helpers.ranks import on_ranks
from tests.helpers.resuming import cut_and_resume, updates_of

pytestmark = pytest.mark.slow


class Row(NamedTuple):
    """A family's checkpoint and cases, every so many of which are run."""

    checkpoint: str
    cases: str
    every: int
    shares: bool = True  # K/V of prefixes, where attention is block-causal
    masked: bool = True


ROWS = {
    "LLaDA": Row("llada", "llada", 6, shares=False),
    "LLaDA-MoE": Row("llada_moe_fused", "llada_moe", 9, shares=False),
    "LLaDA2": Row("llada2_moe", "llada2_moe", 3),
    "LLaDA2.1": Row("llada2_moe", "llada2_edit", 6),
    "Dream": Row("dream", "dream", 13, shares=False),
    "Fast-dLLM v2": Row("fast_dllm_v2", "fast_dllm_v2", 8),
    "Nemotron": Row("nemotron_labs_diffusion", "nemotron_labs_diffusion", 3),
    "A2D": Row("a2d_qwen3", "a2d_qwen3", 5, shares=False),
    "I-DLM": Row("idlm", "idlm", 4),
    "SDAR": Row("sdar", "sdar", 12),
    "SDAR-MoE": Row("sdar_moe", "sdar_moe", 12),
    "DiffusionGemma": Row("diffusion_gemma", "diffusion_gemma", 7, masked=False),
    "Llama": Row("ar_llama", "ar_llama", 4, masked=False),
    "Qwen3": Row("ar_qwen3", "ar_qwen3", 4, masked=False),
}
# Of those that other tests use most, in the long lane.
_LONG = "LLaDA", "LLaDA-MoE", "LLaDA2"
FAMILIES = [pytest.param(name, marks=[pytest.mark.long] * (name in _LONG)) for name in ROWS]


def engine(row: Row, mesh: Mesh | None = None, **options: Any) -> Engine:
    if row.masked:
        options |= {"mask_token_id": MASK, "eos_token_id": EOS}
    setup = EngineOptions(dtype="float64", device="cpu", max_num_seqs=8, page_size=8, **options)
    return build_rank(str(GOLDEN / row.checkpoint), setup, mesh or Mesh())


def requests_of(row: Row) -> list[Request]:
    """Every other one draws its tokens."""
    found, shown = [], images_of(golden(row.cases))
    for number, case in enumerate(cases_of(row.cases)[:: row.every]):
        params = params_of(case).model_copy(update={"temperature": number % 2, "seed": number})
        images = shown if "image" in case else ()
        found.append(Request(number, tuple(case["prompt"]), params, images=images))
    return found


def tokens_of(updates: Iterable[Update]) -> dict[int, list[int]]:
    found: dict[int, list[int]] = {}
    for update in updates:
        found.setdefault(update.uid, []).extend(update.ids)
    return found


@cache
def alone(family: str) -> dict[int, list[int]]:
    """Return the tokens of each request, run by itself without anything of those before."""
    row = ROWS[family]
    made = engine(row, enable_prefix_caching=False)
    return tokens_of(u for each in requests_of(row) for u in updates_of(made, [each], 1))


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.rotate(2)
def test_batched_and_with_shared_prefixes_equal_alone(family: str) -> None:
    """Those that ask again find the K/V of their prompts, where these do not hang on the rest."""
    row = ROWS[family]
    made, asked = engine(row), requests_of(row)
    assert tokens_of(updates_of(made, asked, 1)) == alone(family)
    again = updates_of(made, asked, 3)
    assert tokens_of(again) == alone(family)
    assert (sum(u.cached_tokens for u in again if u.finish_reason) > 0) == row.shares


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.rotate(2)
def test_interrupted_equals_uninterrupted(family: str) -> None:
    """Two engines are lost on the way; the third has something left to do."""
    made: list[Engine] = []

    def another() -> Engine:
        made.append(engine(ROWS[family]))
        return made[-1]

    found = cut_and_resume(another, requests_of(ROWS[family]), 1, [11, 13])
    assert tokens_of(found) == alone(family)
    assert made[-1].forwards > 0


def run_on_rank(mesh: Mesh, *, expert_parallel: bool) -> dict[int, list[int]]:
    row, mesh = ROWS["DiffusionGemma"], replace(mesh, expert_parallel=expert_parallel)
    made = engine(row, mesh)
    return tokens_of(rank_cases.updates_of(mesh, made, requests_of(row)))


@pytest.mark.long
@pytest.mark.parametrize("expert_parallel", [False, True])
def test_two_ranks_equal_one_without_masks(expert_parallel: bool) -> None:
    """The other families are in test_ranks.py."""
    found = on_ranks(2, partial(run_on_rank, expert_parallel=expert_parallel))
    assert found == [alone("DiffusionGemma")] * 2
