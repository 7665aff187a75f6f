"""What a start on a GPU tries, reads and keeps, with a stand-in for the GPU and for the trials."""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.helpers import triton_device  # isort: skip  # noqa: F401
import diffray
from diffray.components import backend
from diffray.components.mesh import Mesh
from diffray.kernels.trial import Outcome, choices_of
from diffray.kernels.triton.experts import EXPERTS
from diffray.kernels.variants import Shape
from diffray.workers.bring_up import start
from diffray.workers.bring_up.findings import Findings, GraphsOutcome
from diffray.workers.bring_up.start import bring_up
from diffray.workers.bring_up.trial_process import TrialPlan
from diffray.workers.bring_up.trials import TimeLimits
from diffray.workers.engine_options import EngineOptions
from tests.helpers.paths import GOLDEN

MODEL = str(GOLDEN / "llada_moe")
SHAPE = Shape((48, "torch.bfloat16"), (8,))
OUTCOME = Outcome("rms_norm", SHAPE, "triton pdl", "", 1e-6, 2e-6, 1e-6)


@pytest.fixture
def tried(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[TrialPlan]:
    """Stand in for a GPU; return the plans that are tried on it."""
    plans: list[TrialPlan] = []

    def try_them(plan: TrialPlan, limits: TimeLimits) -> Findings:
        assert limits == TimeLimits()
        plans.append(plan)
        return Findings(outcomes=(OUTCOME,), graphs=GraphsOutcome("", 2.0, 1.0), seconds=40.0)

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "NVIDIA Test 9000")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    monkeypatch.setattr(backend, "driver_version", lambda: "570.1")
    monkeypatch.setattr(backend, "cuda_recorder", lambda: lambda run: run)
    monkeypatch.setattr(start, "run_trials", try_them)
    return plans


def test_a_first_start_tries_what_the_engine_will_run(tried: list[TrialPlan]) -> None:
    said: list[str] = []
    setup = EngineOptions(quantization="experts_int8", kv_cache_dtype="int8", page_size=32)
    found = bring_up(MODEL, setup, Mesh(), say=said.append)
    (plan,) = tried
    assert plan.device == "cuda" and plan.table == start.TABLE and plan.graphs
    sizes = plan.sizes
    assert (sizes.dtype, sizes.quantization) == ("bfloat16", "experts_int8")
    assert (sizes.page_size, sizes.kv_cache_dtype, sizes.ranks) == (32, "int8", 1)
    assert sizes.config["num_experts"] > 0
    assert found.choices.chosen == {("rms_norm", SHAPE): "triton pdl"}
    known = {"gpu": "NVIDIA Test 9000", "capability": "9.0", "driver": "570.1", "graphs": "True"}
    known |= {"torch": torch.__version__, "diffray": diffray.__version__}
    assert known.items() <= found.key.items()
    assert said[0].startswith("kernels: trying their variants on NVIDIA Test 9000, once")
    assert said[-1] == "kernels: 1 trials in 40 s: 1 fastest, 0 slower, 0 refused"


def test_later_starts_read_what_the_first_found(tried: list[TrialPlan]) -> None:
    first = bring_up(MODEL, EngineOptions(), Mesh(), say=lambda _: None)
    said: list[str] = []
    for options in ({}, {"bring_up": False}):
        assert bring_up(MODEL, EngineOptions(**options), Mesh(), say=said.append) == first
    assert len(tried) == 1 and not said
    bring_up(MODEL, EngineOptions(dtype="float16"), Mesh(), say=said.append)
    assert len(tried) == 2  # of another dtype nothing is known
    bring_up(MODEL, EngineOptions(), Mesh(), again=True, say=said.append)
    assert len(tried) == 3


def test_without_bring_up_nothing_is_tried_nor_kept(tried: list[TrialPlan], tmp_path: Path) -> None:
    assert bring_up(MODEL, EngineOptions(bring_up=False), Mesh()) == Findings()
    assert not tried and not [*tmp_path.rglob("*.json")]


@pytest.mark.parametrize("options", [{"kernels": "torch"}, {"device": "cpu"}])
def test_without_variants_to_choose_from_nothing_is_tried(
    options: dict[str, Any], tried: list[TrialPlan]
) -> None:
    assert bring_up(MODEL, EngineOptions(**options), Mesh()) == Findings()
    assert not tried


def test_graphs_that_are_not_wanted_are_not_tried(tried: list[TrialPlan]) -> None:
    bring_up(MODEL, EngineOptions(cuda_graphs=False), Mesh(), say=lambda _: None)
    assert not tried[0].graphs


def test_ranks_that_have_tried_nothing_together_say_that_they_record_nothing(
    tried: list[TrialPlan],
) -> None:
    said: list[str] = []
    group: Any = SimpleNamespace(group_name="ranks")
    mesh = Mesh(0, 2, group=group, device=torch.device("cuda"))
    found = bring_up(MODEL, EngineOptions(bring_up=False), mesh, say=said.append)
    assert found == Findings() and not tried
    assert said == ["cuda_graphs: off: the ranks have not tried them together"]
    assert found.applied_to(EngineOptions(), 2).cuda_graphs is False


@pytest.mark.parametrize(
    ("dtype", "width", "capability", "recordable"),
    [
        (torch.bfloat16, 64, (9, 0), True),
        (torch.bfloat16, 64, (8, 0), False),  # torch loops over experts there, on the host
        (torch.bfloat16, 60, (9, 0), False),
        (torch.float32, 64, (9, 0), False),
    ],
)
def test_torch_s_grouped_product_is_chosen_where_it_is_recordable_and_faster(
    dtype: torch.dtype,
    width: int,
    capability: tuple[int, int],
    recordable: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It is torch's form of the experts; one that waits for the host would rule out graphs."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    on_gpu: Callable[..., Any] = SimpleNamespace
    x = on_gpu(dtype=dtype, is_cuda=True, device="cuda")
    w2 = torch.empty(8, 64, width, device="meta")
    assert EXPERTS.recordable(x, w2, w2) is recordable
    own = Outcome("experts_forward", SHAPE, "triton", "", 0.0, 3e-6, 2e-6)
    replayed = 1e-6 if recordable else None
    product = Outcome("experts_forward", SHAPE, "torch", "", 0.0, 1e-6, replayed)
    chosen = choices_of([own, product]).chosen
    assert chosen[("experts_forward", SHAPE)] == ("torch" if recordable else "triton")
