"""An engine on several ranks, which are processes, finds what it finds on one."""

import os
import re
import time
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch

from diffray.components.checkpoints.checkpoint import load_model
from diffray.components.lora import LoRA
from diffray.components.mesh import Mesh
from diffray.components.models.registry import build_model
from tests.helpers.adapters import Story
from tests.helpers.paths import GOLDEN
from tests.helpers.rank_cases import (
    Case,
    Found,
    run_adapted,
    run_case,
    run_cases,
    run_drafted,
    run_pinned,
    run_updates,
)
from tests.helpers.ranks import on_ranks
from tests.helpers.tiny_checkpoints import LLADA, LLADA2_MOE, LLADA_MOE, random_weights, save

pytestmark = pytest.mark.slow

DENSE = [str(GOLDEN / name) for name in ("llada", "dream", "fast_dllm_v2", "sdar")]
SPARSE = [str(GOLDEN / name) for name in ("llada_moe", "llada2_moe", "sdar_moe")]
SPARSE += ["demo", "demo-llada2"]
CAUSAL = re.compile("llada2|fast_dllm|sdar")


QUANTIZED = [  # each head has its scales, on whichever rank it is
    Case("demo", False, kv_cache_dtype="int8"),
    Case("demo-llada2", False, kv_cache_dtype="uint4"),
]


@cache
def alone(case: Case) -> Found:
    return run_case(Mesh(), case)


@pytest.mark.parametrize(
    ("size", "dense", "sparse"),
    [
        pytest.param(2, [], SPARSE[1:2], marks=pytest.mark.core),
        pytest.param(2, DENSE, SPARSE, marks=pytest.mark.long),
        pytest.param(4, DENSE, SPARSE[:3], marks=pytest.mark.long),
    ],
    ids=["2 of few", "2", "4"],
)
@pytest.mark.rotate(1)
def test_ranks_find_what_one_finds(
    size: int, dense: list[str], sparse: list[str], tmp_path: Path
) -> None:
    """Every decoder, cache and way of sampling in one batch of each model, and all logits."""
    config = LLADA | {"vocab_size": 65, "n_kv_heads": 2}
    uneven = str(save(tmp_path, config, random_weights(config)))
    cases = [Case(model, False) for model in [*dense, uneven, *sparse]]
    cases += [Case(model, True) for model in sparse]
    cases += QUANTIZED if dense else []
    half = Case(SPARSE[0], True, "bfloat16")
    ranks = on_ranks(size, partial(run_cases, cases=[*cases, half]))

    for number, case in enumerate(cases):
        whole = alone(case._replace(expert_parallel=False))
        parts = [found[number] for found, _ in ranks]
        logits_TV = torch.cat([part.logits_TV for part in parts], dim=1)
        torch.testing.assert_close(logits_TV, whole.logits_TV, rtol=0, atol=1e-9)
        for part in parts:
            assert part.tokens == whole.tokens, case
            assert part.steps == whole.steps, case
            assert part.cached == whole.cached == (32 if CAUSAL.search(case.model) else 0)
            for uid, logprobs in whole.logprobs.items():
                assert part.logprobs[uid] == pytest.approx(logprobs, abs=1e-6)
    # In lower precision the sums of other parts may round to other tokens, but alike on all ranks.
    for found, _ in ranks:
        assert found[-1].tokens == ranks[0][0][-1].tokens
    position = 2 * 6 * 4 * 32 * 4 // size  # bytes: keys and values, layers, heads, size, float32
    assert {pages for _, pages in ranks} == {(1 << 20) // (16 * position) + 1}


@pytest.mark.parametrize(
    ("config", "expert_parallel"),
    [
        (LLADA | {"n_kv_heads": 2}, False),
        pytest.param(LLADA_MOE, False, marks=pytest.mark.long),
        pytest.param(LLADA2_MOE, False, marks=pytest.mark.long),
        pytest.param(LLADA_MOE, True, marks=pytest.mark.long),
        (LLADA2_MOE, True),
    ],
)
def test_ranks_answer_with_adapters_as_one_does(
    tmp_path: Path, config: dict[str, Any], expert_parallel: bool
) -> None:
    """An adapter that one rank cannot read is refused by all of them, and the others run."""
    story = Story(tmp_path, config)
    loras = [LoRA(*each, 1) for each in story.adapters.items()]
    work = partial(run_adapted, folder=str(story.base), adapters=loras)
    whole = work(Mesh())
    parts = on_ranks(2, partial(work, expert_parallel=expert_parallel))
    assert whole.refused == [] and len(whole.tokens[5]) == 12
    for part in parts:
        (reason,) = part.refused
        assert reason.startswith("the adapter 'gone' could not be loaded")
        assert part.tokens == whole.tokens | {5: []}


@pytest.mark.long
@pytest.mark.rotate(1)
@pytest.mark.parametrize("model", ["demo", "demo-llada2"])
def test_ranks_fill_pinned_canvases_as_one_does(model: str) -> None:
    whole = run_pinned(Mesh(), model)
    for part in on_ranks(2, partial(run_pinned, model=model)):
        assert part.tokens == whole.tokens
        for uid, fields in whole.fields.items():
            for path, (probability, options) in fields.items():
                assert part.fields[uid][path][0] == pytest.approx(probability, abs=1e-6)
                assert part.fields[uid][path][1] == pytest.approx(options, abs=1e-6)


@pytest.mark.long
@pytest.mark.rotate(1)
@pytest.mark.parametrize("model", ["demo", "demo-llada2", str(GOLDEN / "sdar")])
def test_ranks_draft_and_branch_as_one_does(model: str) -> None:
    whole = run_drafted(Mesh(), model)
    plain = run_drafted(Mesh(), model, speculation=False)
    assert plain.tokens == whole.tokens and plain.forwards > whole.forwards
    assert on_ranks(2, partial(run_drafted, model=model)) == [whole] * 2


@pytest.mark.long
def test_ranks_take_new_weights_together_or_not_at_all(tmp_path: Path) -> None:
    """The second rank alone reads what is wrong with one of the folders."""
    config = LLADA | {"n_kv_heads": 2}
    weights = random_weights(config)
    names = "model.transformer.wte.weight", "model.transformer.ff_out.weight"
    other = {name: tensor.flip(0) for name, tensor in weights.items()}
    wrong = {name: tensor.clone() for name, tensor in other.items()}
    for name in names:
        wrong[name][-1] = torch.nan
    sets = {"old": weights, "new": other, "wrong": wrong}
    folders = {name: str(save(tmp_path / name, config, each)) for name, each in sets.items()}
    order = [folders[name] for name in ("new", "wrong", "old", "new")]
    whole = run_updates(Mesh(), folders["old"], order)
    assert whole.tokens[0] == whole.tokens[1] == whole.tokens[3] != whole.tokens[2]
    parts = on_ranks(2, partial(run_updates, first=folders["old"], folders=order))
    for part in parts:
        assert part.tokens == whole.tokens
    assert [bool(reason) for reason in whole.refusals] == [False, True, False, False]
    assert parts[0].refusals == ["", "another rank refused the weights; its log says why", "", ""]
    assert "is NaN or infinite" in parts[1].refusals[1]


def memory(key: str) -> int:
    """Return what this process takes, in bytes: VmRSS now, VmHWM at most so far."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(f"{key}:"))


def load_half(_: Mesh, path: str) -> tuple[int, int]:
    """Return how many bytes the second of two ranks holds, and how much loading took at most."""
    load_model(GOLDEN / "llada", dtype="bfloat16", device="cpu")  # whatever is imported is now
    before = memory("VmRSS")
    model = load_model(path, dtype="bfloat16", device="cpu", mesh=Mesh(1, 2))
    return sum(p.nbytes for p in model.parameters()), memory("VmHWM") - before


def test_loading_a_shard_takes_the_memory_of_the_shard(tmp_path: Path) -> None:
    config = LLADA | {"d_model": 1024, "n_layers": 8, "mlp_hidden_size": 4096, "vocab_size": 8192}
    parts = build_model(config, Mesh(), torch.bfloat16).parts(set())
    weights = {name: torch.zeros(part.shape, dtype=torch.bfloat16) for name, part in parts.items()}
    path = save(tmp_path, config, weights)
    file = path / "model.safetensors"
    total = file.stat().st_size
    assert total > 280e6
    ((held, growth),) = on_ranks(1, partial(load_half, path=str(path)))
    assert held < 0.51 * total
    assert growth < 1.3 * held
    file.unlink()


def fail_late(mesh: Mesh) -> None:
    """Wait for a slow rank 1 as loading does, then as a collective does."""
    if mesh.rank == 1:
        time.sleep(4)
    mesh.smallest("anything", mesh.rank)
    if mesh.rank == 1:
        time.sleep(3600)
    with pytest.raises(RuntimeError, match=r"[Tt]imed out"):
        mesh.all_reduce(torch.ones(3))


@pytest.mark.long
def test_loading_may_take_longer_than_a_collective() -> None:
    on_ranks(2, fail_late, timeout=3, listen_to=1)


def lose_one(mesh: Mesh) -> str:
    mesh.all_reduce(torch.ones(3))
    if mesh.rank == 1:
        os._exit(1)
    with pytest.raises(RuntimeError) as error:
        mesh.all_reduce(torch.ones(3))
    return str(error.value)


def test_a_dead_rank_is_noticed_at_once() -> None:
    """Its peer's collective fails; it does not wait until it has timed out."""
    assert "imed out" not in on_ranks(2, lose_one, listen_to=1)[0]
