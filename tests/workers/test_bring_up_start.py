"""What a start on a GPU tries, reads and keeps, with a stand-in for the GPU and for the trials."""

import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from tests.helpers import triton_device  # isort: skip  # noqa: F401
import diffray
from diffray.components import backend
from diffray.components.mesh import Mesh
from diffray.kernels.trial import Outcome
from diffray.kernels.triton.experts import EXPERTS
from diffray.kernels.variants import Shape
from diffray.workers.bring_up import start
from diffray.workers.bring_up.findings import Findings, FindingsFile, GraphsOutcome, cache_folder
from diffray.workers.bring_up.one_layer import Sizes
from diffray.workers.bring_up.start import bring_up, key_of, read_or_try
from diffray.workers.bring_up.trial_process import TrialPlan
from diffray.workers.bring_up.trials import TimeLimits, Trials
from diffray.workers.engine_options import EngineOptions
from tests.helpers.paths import GOLDEN
from tests.helpers.tiny_checkpoints import LLADA2_MOE, LLADA_MOE

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
    bring_up(MODEL, EngineOptions(cuda_graphs=False), Mesh(), again=True, say=said.append)
    assert [plan.graphs for plan in tried] == [True] * 3 + [False]


@pytest.mark.parametrize(
    "options", [{"bring_up": False}, {"kernels": "torch"}, {"device": "cpu"}], ids=str
)
def test_unasked_or_without_variants_to_choose_from_nothing_is_tried(
    options: dict[str, Any], tried: list[TrialPlan], tmp_path: Path
) -> None:
    assert bring_up(MODEL, EngineOptions(**options), Mesh()) == Findings()
    assert not tried and not [*tmp_path.rglob("*.json")]


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


def test_torch_s_grouped_product_is_recorded_only_where_it_can_be(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It is torch's form of the experts; one that waits for the host would rule out graphs."""
    for dtype, width, capability, recordable in (
        (torch.bfloat16, 64, (9, 0), True),
        (torch.bfloat16, 64, (8, 0), False),  # torch loops over experts there, on the host
        (torch.bfloat16, 60, (9, 0), False),
        (torch.float32, 64, (9, 0), False),
    ):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _, found=capability: found)
        x: Any = SimpleNamespace(dtype=dtype, is_cuda=True, device="cuda")
        w2 = torch.empty(8, 64, width, device="meta")
        assert EXPERTS.recordable(x, w2, w2) is recordable


FILE_KEY = {"gpu": "NVIDIA Test 9000", "driver": "1.2"}
RIGHT = Findings(key=FILE_KEY, outcomes=(OUTCOME,), graphs=GraphsOutcome("", 2.0, 1.0))


def plan(*, graphs: bool = False, config: dict[str, Any] = LLADA_MOE, **more: Any) -> TrialPlan:
    sizes = Sizes(config=config, dtype="float32", **more)
    return TrialPlan(sizes=sizes, device="cpu", table="none", graphs=graphs)


def test_what_was_found_is_read_by_all_later_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the same key; a full disk leaves no part of a file."""
    file = FindingsFile(FILE_KEY, tmp_path / "deep")
    assert file.read() is None
    file.write(RIGHT)
    assert file.path.name.startswith("nvidia-test-9000-")
    assert file.read() == RIGHT
    assert FindingsFile(FILE_KEY | {"driver": "1.3"}, tmp_path / "deep").read() is None

    full = OSError("no space left on device")
    monkeypatch.setattr("os.replace", Mock(side_effect=full))
    with pytest.raises(OSError, match="no space left"):
        file.write(Findings())
    assert file.read() == RIGHT
    assert [each.name for each in file.path.parent.iterdir()] == [file.path.name]


def test_a_file_that_is_damaged_or_of_another_key_is_ignored(tmp_path: Path) -> None:
    """So is a folder that cannot be made."""
    file = FindingsFile(FILE_KEY, tmp_path)
    for text in ("", "{", "[]", "null", '{"outcomes": 1}', "\0\xff", "{}"):
        file.path.write_text(text)
        assert file.read() is None
    nowhere = FindingsFile(FILE_KEY, file.path / "deep")
    with nowhere.lock(1.0):
        assert nowhere.read() is None


def test_waiting_for_another_process_has_a_limit(tmp_path: Path) -> None:
    file = FindingsFile(FILE_KEY, tmp_path)
    began = time.monotonic()
    with file.lock(60.0), file.lock(0.1):
        assert 0.1 < time.monotonic() - began < 30


def test_files_are_in_the_user_s_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A user without a home, as in some containers, has one among the temporary files."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_folder() == tmp_path / "diffray/kernels"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache_folder() == Path.home() / ".cache/diffray/kernels"
    no_home = RuntimeError("Could not determine home directory.")
    monkeypatch.setattr(Path, "home", Mock(side_effect=no_home))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    assert cache_folder().is_relative_to(tmp_path)


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


@pytest.mark.parametrize(
    ("refused", "kept"),
    [
        ("wrong: error 1.0e+00, at most 5.0e-02 allowed", True),
        ("OutOfMemoryError: CUDA out of memory.", False),
        ("when recorded: OutOfMemoryError: CUDA out of memory.", False),
    ],
)
def test_what_was_refused_for_want_of_memory_is_tried_again_at_the_next_start(
    refused: str, kept: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    outcome = Findings(outcomes=(OUTCOME, Outcome("rms_norm", SHAPE, "other", refused)))
    monkeypatch.setattr(start, "run_trials", lambda *_: outcome)
    file = FindingsFile(FILE_KEY, tmp_path)
    said: list[str] = []
    found = read_or_try(plan(), file, say=said.append)
    assert found.outcomes == outcome.outcomes
    assert (file.read() == found) is kept
    assert ("the next start tries again" in said[-1]) is not kept


def test_a_failure_is_not_kept_and_removes_what_was_found_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Else the next start would use what has just been found not to work."""
    file = FindingsFile(FILE_KEY, tmp_path)
    file.write(RIGHT)
    monkeypatch.setattr(start, "run_trials", lambda *_: Findings(failed="it broke"))
    for _ in range(2):  # the second time it is gone already
        assert read_or_try(plan(), file, again=True).failed == "it broke"
        assert file.read() is None
    last = capsys.readouterr().err.splitlines()[-1]
    assert last == "diffray: kernels: only torch's are used: it broke"


class Interrupted(Trials):
    """Trials whose process ends while it records steps or before that."""

    def _one_process(self, limit: float, bar: object) -> str:
        self.outcomes, self.wrong = [OUTCOME], {"fastest": ""}
        return "the time is up"


@pytest.mark.parametrize("graphs", [True, False])
def test_graphs_that_were_not_tried_are_not_used(graphs: bool) -> None:
    trials = Interrupted(plan(graphs=graphs), TimeLimits())
    trials.run()
    refused = GraphsOutcome("they were not tried: the time is up")
    assert trials.failed == "" and trials.graphs == ({"fastest": refused} if graphs else {})
    found = Findings(graphs=trials.graphs.get(trials.selection))
    assert found.applied_to(EngineOptions()).cuda_graphs is (False if graphs else None)


def test_variants_that_start_early_are_used_if_they_make_a_step_faster() -> None:
    """By themselves they are no faster; the fastest ones were right together."""
    slow, fast, none = GraphsOutcome("", 3.0, 2.0), GraphsOutcome("", 3.0, 1.9), GraphsOutcome("no")
    trials = Trials(plan(graphs=True), TimeLimits())
    for wrong, launched, early, selection in (
        ("", slow, fast, "early"),
        ("", fast, slow, "fastest"),
        ("they race", slow, fast, "fastest"),
        ("", slow, none, "fastest"),
        ("", none, slow, "early"),
        ("", none, none, "fastest"),
    ):
        trials.wrong = {"fastest": "", "early": wrong}
        trials.graphs = {"fastest": launched, "early": early}
        assert trials.selection == selection
    found = Findings(conflicts={"early": "they race"})
    line = "kernels: the earliest variants are not used: they fail together: they race"
    assert [*found.lines()] == [line]
