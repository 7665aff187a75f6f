"""Bring-up refuses variants that are wrong, crash, hang, do not compile or are slower.

Without a GPU stand-ins are tried (tests/helpers/stand_in_kernels.py), in real child processes.
"""

import os
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.helpers.triton_device import DEVICE  # isort: skip
from diffray import SamplingParams
from diffray.components.mesh import Mesh
from diffray.kernels.trial import Outcome
from diffray.kernels.triton import table
from diffray.kernels.variants import Shape, Variant
from diffray.workers.bring_up.findings import Findings, FindingsFile, GraphsOutcome, cache_folder
from diffray.workers.bring_up.one_layer import OneLayer, Sizes, Step
from diffray.workers.bring_up.start import bring_up, key_of, read_or_try
from diffray.workers.bring_up.trial_process import Calls, TrialPlan, collecting, trials_of
from diffray.workers.bring_up.trials import TimeLimits, run_trials
from diffray.workers.engine_options import EngineOptions
from diffray.workers.messages import Request
from diffray.workers.setup import build_rank
from tests.helpers import stand_in_kernels
from tests.helpers.rank_findings import FOUND, tokens_with_rank_0s_choices
from tests.helpers.ranks import on_ranks
from tests.helpers.tiny_checkpoints import (
    DREAM,
    FAST_DLLM_V2,
    LLADA,
    LLADA2_MOE,
    LLADA_MOE,
    SDAR,
    SDAR_MOE,
    random_weights,
    save,
)
from tests.helpers.toy import run

CPU = torch.device("cpu")
STAND_INS = "tests.helpers.stand_in_kernels"
LONG = TimeLimits(budget=300, limit=600, trial=5)


def plan(table: str = STAND_INS, config: dict[str, Any] = LLADA_MOE, **more: Any) -> TrialPlan:
    sizes = Sizes(config=config, dtype="float32", **more)
    return TrialPlan(sizes=sizes, device="cpu", table=table, graphs=False)


@pytest.fixture(scope="module")
def found() -> Findings:
    return run_trials(plan(), LONG)


@pytest.mark.long
def test_each_kind_of_bad_variant_is_refused_for_its_reason(found: Findings) -> None:
    norms = [each for each in found.outcomes if each.kernel == "rms_norm"]
    reasons = {each.variant: each.refused for each in norms}
    assert reasons["wrong"].startswith("wrong: error ")
    assert reasons["crash"] == "it crashed (SIGABRT)"
    assert reasons["not_compiled"] == "SyntaxError: at 7:12: the stand-in does not compile"
    assert reasons["hang"] == "it did not end within 5 s"
    assert {name for name, reason in reasons.items() if not reason} == {"slow", "right", "torch"}
    assert found.failed == "" and found.untried == 0


@pytest.mark.long
def test_only_what_is_right_and_fast_is_chosen(found: Findings) -> None:
    chosen: dict[str, set[str]] = {"rms_norm": set(), "linear_add_norm": set()}
    for (kernel, _), variant in found.choices.chosen.items():
        chosen[kernel].add(variant)
    assert chosen["rms_norm"] <= {"right", "torch"} and chosen["linear_add_norm"] == {"torch"}
    assert set(found.choices.chosen) == {(each.kernel, each.shape) for each in found.outcomes}


@pytest.mark.long
def test_one_line_names_each_refused_variant(found: Findings) -> None:
    lines = list(found.lines())
    assert len(lines) == 4 and all(line.startswith("kernels: rms_norm '") for line in lines)
    assert "'crash' is refused at 32: it crashed (SIGABRT)" in " ".join(lines)
    assert found.summary().startswith(f"kernels: {len(found.outcomes)} trials in ")
    assert found.summary().endswith(" slower, 4 refused")


def tokens(folder: Path, found: Findings, **options: Any) -> list[int]:
    setup = EngineOptions(
        dtype="float32", device="cpu", mask_token_id=62, eos_token_id=63, **options
    )
    engine = build_rank(str(folder), setup, Mesh(), found)
    params = SamplingParams(max_tokens=16, ignore_eos=True)
    return run(engine, [Request(0, (5, 6, 7), params)])[0]


@pytest.mark.long
@pytest.mark.parametrize("config", [LLADA_MOE, LLADA2_MOE], ids=["bidirectional", "causal"])
def test_the_engine_starts_and_never_runs_what_was_refused(
    config: dict[str, Any], found: Findings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The default is wrong and the next one aborts: with their results the tokens would differ."""
    folder = save(tmp_path, config, random_weights(config))
    monkeypatch.setattr(table, "KERNELS", stand_in_kernels.KERNELS)
    without = found.model_copy(update={"outcomes": ()})
    expected = tokens(folder, Findings(), kernels="torch")
    assert tokens(folder, found, kernels="triton") == expected
    assert without.choices.pick("rms_norm", Shape((), ()), [Variant("wrong", id)]).name == "wrong"


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
    assert broken.applied_to(EngineOptions(kernels="triton")).kernels == "torch"
    folder = save(tmp_path, LLADA, random_weights(LLADA))
    expected = tokens(folder, Findings(), kernels="torch")
    assert tokens(folder, broken, kernels="triton") == expected


@pytest.mark.long
def test_without_time_only_defaults_are_tried_and_the_next_start_goes_on(tmp_path: Path) -> None:
    file, said = FindingsFile({"gpu": "Test"}, tmp_path), list[str]()
    hurried = TimeLimits(budget=-1, limit=600, trial=5)
    first = read_or_try(plan(), file, limits=hurried, say=said.append)
    assert {each.variant for each in first.outcomes} == {"wrong", "slow_sum"}
    assert first.cut_off and first.untried == 5 * 6 + 5
    assert "kernels: there was no time for 35 more trials; the next start continues" in said
    # Of the wrong one torch's form runs, untried.
    assert set(first.choices.chosen.values()) == {"slow_sum"}

    second = read_or_try(plan(), file, limits=LONG, say=said.append)
    assert second.outcomes[: len(first.outcomes)] == first.outcomes  # not tried again
    tried = [(each.kernel, each.shape, each.variant) for each in second.outcomes]
    assert len(tried) == len(set(tried)) and second.untried == 0 and not second.cut_off
    assert file.read() == second

    lines = len(said)
    assert read_or_try(plan(), file, limits=LONG, say=said.append) == second
    assert len(said) == lines  # nothing is left to try


@pytest.mark.long
def test_a_start_that_gets_no_further_is_the_last_to_try(tmp_path: Path) -> None:
    file, said = FindingsFile({"gpu": "Test"}, tmp_path), list[str]()
    hurried = TimeLimits(budget=-1, limit=600, trial=5)
    first, second = (read_or_try(plan(), file, limits=hurried, say=said.append) for _ in range(2))
    assert first.cut_off and not second.cut_off
    assert "kernels: there was no time for 35 more trials; they are skipped" in said


@pytest.mark.long
def test_trials_end_when_the_time_is_up() -> None:
    found = run_trials(plan(), TimeLimits(budget=300, limit=0.5))
    assert found.failed == "the trials failed: the time is up" and not found.outcomes


CONFIGS = {
    "llada": LLADA, "dream": DREAM, "fast_dllm_v2": FAST_DLLM_V2, "sdar": SDAR,
    "llada_moe": LLADA_MOE, "llada2_moe": LLADA2_MOE, "sdar_moe": SDAR_MOE,
}  # fmt: skip


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("ranks", [1, 2])
def test_the_trials_are_of_the_calls_that_the_model_makes(name: str, ranks: int) -> None:
    """Every kernel of the table that the family uses, at every size, on two kinds of inputs."""
    calls: Calls = {}
    sizes = Sizes(config=CONFIGS[name], dtype="float32", ranks=ranks)
    OneLayer(sizes, CPU, collecting(table.KERNELS, calls)).run()
    kernels = {kernel for kernel, _ in calls}
    routers = {name: {"softmax_router"} for name in ("llada_moe", "sdar_moe")}
    routers["llada2_moe"] = {"grouped_sigmoid_router"}
    sparse = "experts_add_norm" if ranks == 1 else "experts_forward"
    experts = {sparse} if name in routers else set()
    shared = {"rms_norm", "attend", "confidence", "reward", "settle"}
    if ranks == 1:
        shared.add("linear_add_norm")
    if ranks > 1 or name not in routers:
        shared.add("add_norm")
    assert kernels == shared | routers.get(name, set()) | experts
    for kernel in kernels - {"confidence"}:
        shapes = [shape for owner, shape in calls if owner == kernel]
        fewest = 3 if kernel == "reward" else 4  # as drawing, of one and of many windows
        assert len(shapes) >= fewest and len({shape.facts for shape in shapes}) == 1
    assert all(len(own) > 1 for own in calls.values())
    asked = {shape.facts[-1] for kernel, shape in calls if kernel == "confidence"}
    assert asked == {"best", "drawn"}


@pytest.mark.parametrize(
    ("ranks", "name"), [(1, "experts_add_norm"), (2, "quantized_experts_forward")]
)
def test_quantized_experts_are_tried_as_they_are_stored(ranks: int, name: str) -> None:
    calls: Calls = {}
    sizes = Sizes(config=LLADA_MOE, dtype="float32", quantization="experts_int8", ranks=ranks)
    OneLayer(sizes, CPU, collecting(table.KERNELS, calls)).run()
    own = [shape for kernel, shape in calls if kernel == name]
    assert own and all("torch.int8" in shape.facts for shape in own)


def test_defaults_come_first_then_the_others_in_turn_and_torch_last() -> None:
    """Were it first, a start that runs out of time would choose it for want of others."""
    calls: Calls = {}
    OneLayer(plan().sizes, CPU, collecting(stand_in_kernels.KERNELS, calls)).run()
    trials = trials_of(calls, [])
    sizes = len(calls) // 2
    names = [trial.variant.name for trial in trials]
    assert set(names[: 2 * sizes]) == {"wrong", "slow_sum"}
    assert names[2 * sizes : 3 * sizes] == ["crash"] * sizes
    assert set(names[-2 * sizes :]) == {"torch"}
    assert [trial.needed for trial in trials] == [True] * 2 * sizes + [False] * 7 * sizes
    done = [trials[0].begin]
    assert len(trials_of(calls, done)) == len(trials) - 1


@pytest.mark.long
@pytest.mark.skipif(DEVICE.type == "cuda", reason="`diffray doctor` does it there")
@pytest.mark.parametrize("name", ["llada_moe", "llada2_moe"])
def test_triton_s_variants_pass_in_the_interpreter(name: str) -> None:
    """On small steps: those of an engine take an hour there."""
    steps = Step(1, 8, 32), Step(3, 8, 40), Step(1, 32, 32)
    found = run_trials(
        plan("diffray.kernels.triton.table", CONFIGS[name], steps=steps),
        TimeLimits(budget=240, limit=280, trial=200),
    )
    assert found.failed == "" and not [each for each in found.outcomes if each.refused]
    assert {each.variant.split()[0] for each in found.outcomes} == {"triton", "torch"}


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


OUTCOME = Outcome("rms_norm", Shape((32, "torch.float32"), (8,)), "right", "", 1e-6, 2e-6, None)


def test_what_was_found_is_read_by_all_later_starts(tmp_path: Path) -> None:
    file = FindingsFile({"gpu": "NVIDIA Test 9000", "driver": "1.2"}, tmp_path / "deep")
    found = Findings(key=file.key, outcomes=(OUTCOME,), graphs=GraphsOutcome("", 2.0, 1.0))
    assert file.read() is None
    file.write(found)
    assert file.path.name.startswith("nvidia-test-9000-")
    assert file.read() == found
    assert [each.name for each in file.path.parent.iterdir()] == [file.path.name]
    other = FindingsFile(file.key | {"driver": "1.3"}, tmp_path / "deep")
    assert other.read() is None


@pytest.mark.parametrize("text", ["", "{", "[]", "null", '{"outcomes": 1}', "\0\xff", "{}"])
def test_a_file_that_is_damaged_or_of_another_key_is_ignored(text: str, tmp_path: Path) -> None:
    file = FindingsFile({"gpu": "NVIDIA Test 9000"}, tmp_path)
    file.path.write_text(text)
    assert file.read() is None


@pytest.mark.long
def test_a_known_key_is_not_tried_again_unless_asked(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = FindingsFile({"gpu": "Test"}, tmp_path)
    known = Findings(key=file.key, outcomes=(OUTCOME,))
    file.write(known)
    assert read_or_try(plan(), file, limits=LONG) == known
    assert capsys.readouterr().err == ""
    again = read_or_try(plan(), file, again=True, limits=LONG)
    assert again != known and file.read() == again
    lines = capsys.readouterr().err.splitlines()
    assert [
        line for line in lines if line.startswith("diffray: kernels: rms_norm 'crash' is refused")
    ]
    assert " trials in " in lines[-1]


def test_a_failure_is_not_kept(tmp_path: Path) -> None:
    file = FindingsFile({"gpu": "Test"}, tmp_path)
    found = read_or_try(plan("tests.helpers.no_such_table"), file, limits=LONG)
    assert found.failed and file.read() is None


@pytest.mark.skipif(os.geteuid() == 0, reason="root can write anywhere")
def test_a_folder_that_cannot_be_written_to_does_not_stop_the_start(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    file = FindingsFile({"gpu": "Test"}, tmp_path / "deep")
    with file.lock(1.0):
        assert file.read() is None


def test_the_key_names_everything_that_a_choice_depends_on() -> None:
    plain = key_of(plan())
    assert {"gpu", "driver", "torch", "triton", "diffray", "kernels", "model"} <= plain.keys()
    others = [
        plan(config=LLADA_MOE | {"hidden_size": 64}),
        plan(config=LLADA2_MOE),
        plan(ranks=2),
        plan(quantization="experts_int8"),
        plan(page_size=32),
    ]
    keys = {tuple(sorted(key_of(each).items())) for each in (plan(), *others)}
    assert len(keys) == 1 + len(others)
    fewer_layers = LLADA_MOE | {"num_hidden_layers": 1, "moe_layer_freq": [1]}
    assert key_of(plan(config=fewer_layers)) == plain


def test_files_are_in_the_user_s_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_folder() == tmp_path / "diffray/kernels"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache_folder() == Path.home() / ".cache/diffray/kernels"


@pytest.mark.parametrize(
    "setup",
    [
        EngineOptions(device="cpu"),
        EngineOptions(device="cpu", kernels="triton"),
        EngineOptions(device="cpu", bring_up=False),
    ],
)
def test_on_a_cpu_nothing_is_tried(setup: EngineOptions) -> None:
    assert bring_up("no such model", setup, Mesh()) == Findings()
