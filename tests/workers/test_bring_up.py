"""Kernels that are wrong, crash, hang or do not compile give way to torch's.

Without a GPU stand-ins are checked (tests/helpers/stand_in_kernels.py), in real child processes.
"""

import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.helpers import triton_device  # isort: skip  # noqa: F401
from diffray.components.mesh import Mesh
from diffray.workers.bring_up.check import CheckPlan
from diffray.workers.bring_up.child import TimeLimits, run_check
from diffray.workers.bring_up.one_layer import Sizes
from diffray.workers.engine_options import EngineOptions
from diffray.workers.setup import build_rank
from tests.helpers.rank_findings import FOUND, tokens_with_rank_0s_findings
from tests.helpers.ranks import on_ranks
from tests.helpers.tiny_checkpoints import LLADA, LLADA_MOE, random_weights, save

STAND_INS = "tests.helpers.stand_in_kernels"
LONG = TimeLimits(everything=600, one=30)


def plan(table: str = STAND_INS, config: dict[str, Any] = LLADA_MOE) -> CheckPlan:
    sizes = Sizes(config=config, dtype="float32")
    return CheckPlan(sizes=sizes, device="cpu", table=table)


@pytest.mark.long
def test_each_kind_of_bad_kernel_is_refused_for_its_reason_and_said_in_a_line() -> None:
    found = run_check(plan(), LONG)
    assert found.refused.pop("rms_norm").startswith("wrong: error ")
    assert found.refused == {
        "linear_add_norm": "SyntaxError: at 7:12: the stand-in does not compile",
        "softmax_router": "it crashed (SIGABRT)",
        "experts_add_norm": "it did not end within 30 s",
        "confidence": "RuntimeError: an illegal memory access was encountered",
    }
    assert found.failed == ""
    lines = list(found.lines())
    assert len(lines) == 4 and "kernels: torch's softmax_router is used: it crashed" in lines[1]


@pytest.mark.long
def test_all_ranks_run_what_rank_0_found(tmp_path: Path) -> None:
    """A rank that ran one of the refused kernels would have other tokens, or crash."""
    folder = save(tmp_path, LLADA_MOE, random_weights(LLADA_MOE))
    for found, tokens, expected in on_ranks(
        2, partial(tokens_with_rank_0s_findings, folder=folder)
    ):
        assert found == FOUND and tokens == expected


def test_when_nothing_could_be_checked_the_engine_runs_on_torch(tmp_path: Path) -> None:
    broken = run_check(plan("tests.helpers.no_such_table"), LONG)
    assert "the check failed: it ended (1): ModuleNotFoundError: " in broken.failed
    assert [line[:31] for line in broken.lines()] == ["kernels: only torch's are used:"]
    folder = save(tmp_path, LLADA, random_weights(LLADA))
    options = EngineOptions(
        dtype="float32", device="cpu", kernels="triton", mask_token_id=62, eos_token_id=63
    )
    assert build_rank(str(folder), options, Mesh(), broken).kv.kernels.name == "torch"


@pytest.mark.long
def test_kernels_that_are_wrong_together_are_not_used() -> None:
    found = run_check(plan("tests.helpers.stand_in_overlap"), LONG)
    assert found.refused == {}
    assert found.failed == "they are wrong together: 100% of a step's rows differ from torch's"


@pytest.mark.long
def test_when_every_kernel_is_refused_the_check_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The crash leaves a process that holds the output, and each process begins with a greeting."""
    (tmp_path / "sitecustomize.py").write_text("print('hello')\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    found = run_check(plan("tests.helpers.stand_in_refusals", LLADA), LONG)
    assert found.refused == {
        "rms_norm": "RuntimeError: Failed to find C compiler",
        "attend": "it crashed (SIGABRT)",
    }
    assert found.failed == "every kernel is refused" and found.seconds < 300


@pytest.mark.long
@pytest.mark.parametrize("hangs", ["a kernel", "the start"])
def test_a_hang_does_not_exceed_the_limit(
    hangs: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = STAND_INS
    if hangs == "the start":
        (tmp_path / "hanging_table.py").write_text("import time\ntime.sleep(600)\n")
        monkeypatch.syspath_prepend(str(tmp_path))
        table = "hanging_table"
    limit = 10.0
    began = time.monotonic()
    found = run_check(plan(table), TimeLimits(everything=limit, one=100))
    assert time.monotonic() - began < limit + 10
    assert found.failed.startswith("the check failed") and "it did not end within" in found.failed
