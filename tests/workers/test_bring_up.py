"""Bring-up refuses variants that are wrong, crash, hang, do not compile or are slower.

Without a GPU stand-ins are tried (tests/helpers/stand_in_kernels.py), in real child processes.
"""

import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.helpers import triton_device  # isort: skip  # noqa: F401
from diffray.components.mesh import Mesh
from diffray.workers.bring_up.findings import Findings, FindingsFile
from diffray.workers.bring_up.one_layer import Sizes
from diffray.workers.bring_up.start import read_or_try
from diffray.workers.bring_up.trial_process import TrialPlan
from diffray.workers.bring_up.trials import TimeLimits, run_trials
from diffray.workers.engine_options import EngineOptions
from diffray.workers.setup import build_rank
from tests.helpers.rank_findings import FOUND, tokens_with_rank_0s_choices
from tests.helpers.ranks import on_ranks
from tests.helpers.tiny_checkpoints import LLADA, LLADA_MOE, random_weights, save

STAND_INS = "tests.helpers.stand_in_kernels"
LONG = TimeLimits(budget=300, limit=600, trial=5)


def plan(table: str = STAND_INS, config: dict[str, Any] = LLADA_MOE) -> TrialPlan:
    sizes = Sizes(config=config, dtype="float32")
    return TrialPlan(sizes=sizes, device="cpu", table=table, graphs=False)


@pytest.mark.long
def test_each_kind_of_bad_variant_is_refused_for_its_reason_and_said_in_a_line() -> None:
    found = run_trials(plan(), LONG)
    norms = [each for each in found.outcomes if each.kernel == "rms_norm"]
    reasons = {each.variant: each.refused for each in norms}
    assert reasons["wrong"].startswith("wrong: error ")
    assert reasons["crash"] == "it crashed (SIGABRT)"
    assert reasons["not_compiled"] == "SyntaxError: at 7:12: the stand-in does not compile"
    assert reasons["hang"] == "it did not end within 5 s"
    assert {name for name, reason in reasons.items() if not reason} == {"slow", "right", "torch"}
    assert found.failed == "" and found.untried == 0
    # Only what is right and fast is chosen.
    chosen: dict[str, set[str]] = {"rms_norm": set(), "linear_add_norm": set()}
    for (kernel, _), variant in found.choices.chosen.items():
        chosen[kernel].add(variant)
    assert chosen["rms_norm"] <= {"right", "torch"} and chosen["linear_add_norm"] == {"torch"}
    assert set(found.choices.chosen) == {(each.kernel, each.shape) for each in found.outcomes}
    lines = list(found.lines())
    assert len(lines) == 4 and all(line.startswith("kernels: rms_norm '") for line in lines)
    assert "'crash' is refused at 32: it crashed (SIGABRT)" in " ".join(lines)
    assert found.summary().startswith(f"kernels: {len(found.outcomes)} trials in ")
    assert found.summary().endswith(" slower, 4 refused")


@pytest.mark.long
def test_all_ranks_run_what_rank_0_found(tmp_path: Path) -> None:
    """The default is wrong: a rank that ran it would have other tokens, and rank 0 too."""
    folder = save(tmp_path, LLADA_MOE, random_weights(LLADA_MOE))
    for found, tokens, expected in on_ranks(2, partial(tokens_with_rank_0s_choices, folder=folder)):
        assert found == FOUND and tokens == expected


def test_when_nothing_could_be_tried_the_engine_runs_on_torch(tmp_path: Path) -> None:
    broken = run_trials(plan("tests.helpers.no_such_table"), LONG)
    assert "the trials failed: it ended (1): ModuleNotFoundError: " in broken.failed
    assert [line[:31] for line in broken.lines()] == ["kernels: only torch's are used:"]
    folder = save(tmp_path, LLADA, random_weights(LLADA))
    options = EngineOptions(
        dtype="float32", device="cpu", kernels="triton", mask_token_id=62, eos_token_id=63
    )
    assert build_rank(str(folder), options, Mesh(), broken).kv.kernels.name == "torch"


@pytest.mark.long
def test_without_time_only_defaults_are_tried_and_the_next_start_goes_on(tmp_path: Path) -> None:
    file, said = FindingsFile({"gpu": "Test"}, tmp_path), list[str]()

    def start(limits: TimeLimits) -> Findings:
        return read_or_try(plan(), file, limits=limits, say=said.append)

    hurried = TimeLimits(budget=-1, limit=600, trial=5)
    first = start(hurried)
    assert {each.variant for each in first.outcomes} == {"wrong", "slow_sum"}
    assert first.cut_off and first.untried == 5 * 6 + 5
    assert "kernels: there was no time for 35 more trials; the next start continues" in said
    # Of the wrong one torch's form runs, untried.
    assert set(first.choices.chosen.values()) == {"slow_sum"}

    assert not start(hurried).cut_off  # one that gets no further is the last to try
    assert "kernels: there was no time for 35 more trials; they are skipped" in said

    file.write(first)
    second = start(LONG)
    assert second.outcomes[: len(first.outcomes)] == first.outcomes  # not tried again
    tried = [(each.kernel, each.shape, each.variant) for each in second.outcomes]
    assert len(tried) == len(set(tried)) and second.untried == 0 and not second.cut_off
    assert file.read() == second

    lines = len(said)
    assert start(LONG) == second
    assert len(said) == lines  # nothing is left to try


@pytest.mark.long
def test_variants_that_are_wrong_together_give_way_to_the_defaults() -> None:
    found = run_trials(plan("tests.helpers.stand_in_overlap"), LONG)
    right = [each.variant for each in found.outcomes if not each.refused]
    assert len(right) == len(found.outcomes) and "stale" in right
    assert found.selection == "defaults"
    assert found.conflicts == {"fastest": "100% of a step's rows differ from torch's"}
    assert "stale" not in found.choices.chosen.values()
    assert {"default", "counted"} & set(found.choices.chosen.values())
    assert [*found.lines()] == [
        "kernels: the fastest variants are not used: they fail together: 100% of a step's rows "
        "differ from torch's"
    ]


@pytest.mark.long
def test_when_every_variant_is_refused_only_torch_is_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The crash leaves a process that holds the output, and each process begins with a greeting."""
    (tmp_path / "sitecustomize.py").write_text("print('hello')\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    began = time.monotonic()
    found = run_trials(plan("tests.helpers.stand_in_refusals", LLADA), LONG)
    assert time.monotonic() - began < 120  # the process that is left sleeps for longer
    assert found.failed == (
        "every variant is refused, the first because: RuntimeError: Failed to find C compiler"
    )
    assert "it did not end within 5 s" in {each.refused for each in found.outcomes}
    assert [*found.lines()] == [f"kernels: only torch's are used: {found.failed}"]


@pytest.mark.long
@pytest.mark.parametrize("hangs", ["a trial", "the start"])
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
    found = run_trials(plan(table, LLADA), TimeLimits(budget=300, limit=limit, trial=100))
    assert time.monotonic() - began < limit + 10
    assert found.failed == "the trials failed: the time is up"
