"""How many threads compute, and how long they hold a core while they wait."""

import os
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from diffray import DiffusionLLM, SamplingParams
from diffray.cluster.serve.app_config import app_config
from diffray.cluster.serve.deployment import threads_of_ranks
from diffray.components.backend import threads_for, use_threads
from diffray.components.container import usable_cores
from diffray.components.denoiser import Denoiser
from tests.helpers.paths import GOLDEN

LLADA = str(GOLDEN / "llada")
IDS = {"mask_token_id": 510, "eos_token_id": 511}


def threads(cores: int, *models: dict[str, Any]) -> int | None:
    common = {"engine_kwargs": {"device": "cpu"}}
    given = [{"model_loading_config": {"model_id": "demo"}} | common | model for model in models]
    return threads_of_ranks([app_config(each) for each in given], cores)


@pytest.mark.parametrize(("cores", "alone", "of_two"), [(1, 1, 1), (2, 2, 1), (16, 16, 8)])
def test_ranks_share_this_machines_cores(cores: int, alone: int, of_two: int) -> None:
    two = {"engine_kwargs": {"device": "cpu", "tensor_parallel_size": 2}}
    grows = {"deployment_config": {"autoscaling_config": {"min_replicas": 1, "max_replicas": 2}}}
    assert threads(cores, {}) == alone
    assert threads(cores, {"deployment_config": {"num_replicas": 2}}) == of_two
    assert threads(cores, grows) == threads(cores, two) == threads(cores, {}, {}) == of_two
    gpu = {"engine_kwargs": {"device": "cuda"}}  # takes no share
    assert threads(cores, gpu) is None and threads(cores, gpu, {}) == alone


@pytest.fixture
def threads_kept() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("threads_kept")
def test_torch_takes_no_more_threads_than_may_run() -> None:
    cores = usable_cores()
    torch.set_num_threads(cores + 3)
    for wish, used in ((None, cores), (cores + 1, cores), (1, 1), (None, 1)):
        use_threads(wish)
        assert torch.get_num_threads() == used


@pytest.mark.usefixtures("threads_kept")
@pytest.mark.parametrize(("wish", "expected"), [(None, 1), (2, 2)])
def test_a_small_model_begins_with_one_thread_unless_told(
    wish: int | None, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Torch may have three, on however few cores."""
    monkeypatch.setattr("diffray.components.backend.usable_cores", lambda: 3)
    torch.set_num_threads(3)
    used: set[int] = set()
    forward = Denoiser.forward

    def watched(self: Denoiser, *given: Any) -> Tensor:
        used.add(torch.get_num_threads())
        return forward(self, *given)

    monkeypatch.setattr(Denoiser, "forward", watched)
    with DiffusionLLM(LLADA, dtype="float64", cpu_threads=wish, **IDS) as llm:  # type: ignore[arg-type]
        llm.generate([1, 2], SamplingParams(max_tokens=4))
    assert used == {expected}
    assert torch.get_num_threads() == (wish or 3)
    assert [threads_for(weights) for weights in (0, 10**6, 20 * 10**6, 10**9)] == [1, 1, 2, 125]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("module", "said", "spins"),
    [
        ("diffray.workers.worker", {}, "10000"),
        ("diffray.cluster.control.llm", {"GOMP_SPINCOUNT": "77"}, "77"),
        ("diffray.cluster.cli.main", {"OMP_WAIT_POLICY": "passive"}, "0"),
    ],
)
@pytest.mark.rotate(1)
def test_waiting_threads_leave_their_core(module: str, said: dict[str, str], spins: str) -> None:
    """The library's own setting; a value that the user set beforehand is kept."""
    names = ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")
    clean = {name: text for name, text in os.environ.items() if name not in names}
    run = subprocess.run(
        [sys.executable, "-c", f"import {module}, torch"],
        env=clean | {"OMP_DISPLAY_ENV": "verbose"} | said,
        capture_output=True,
        text=True,
        check=True,
    )
    (line,) = (line for line in run.stderr.splitlines() if "GOMP_SPINCOUNT" in line)
    assert line.split("'")[1] == spins
