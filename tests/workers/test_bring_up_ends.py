"""Bring-up ends, and the engine starts, whatever processes, folders and memory do."""

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from diffray.kernels.trial import Outcome
from diffray.kernels.variants import Shape
from diffray.workers.bring_up import start
from diffray.workers.bring_up.findings import Findings, FindingsFile, GraphsOutcome, cache_folder
from diffray.workers.bring_up.one_layer import Sizes
from diffray.workers.bring_up.start import read_or_try
from diffray.workers.bring_up.trial_process import TrialPlan
from diffray.workers.bring_up.trials import TimeLimits, Trials, run_trials
from diffray.workers.engine_options import EngineOptions
from tests.helpers.tiny_checkpoints import LLADA

LIMITS = TimeLimits(budget=300, limit=600, trial=5)
SHAPE = Shape((32, "torch.float32"), (8,))
RIGHT = Outcome("rms_norm", SHAPE, "right", "", 1e-6, 2e-6, None)


def plan(table: str, *, graphs: bool = False) -> TrialPlan:
    sizes = Sizes(config=LLADA, dtype="float32")
    return TrialPlan(sizes=sizes, device="cpu", table=table, graphs=graphs)


@pytest.mark.long
def test_when_every_variant_is_refused_only_torch_is_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The crash leaves a process that holds the output, and each process begins with a greeting."""
    (tmp_path / "sitecustomize.py").write_text("print('hello')\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    began = time.monotonic()
    found = run_trials(plan("tests.helpers.stand_in_refusals"), LIMITS)
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
    table = "tests.helpers.stand_in_kernels"
    if hangs == "the start":
        (tmp_path / "hanging_table.py").write_text("import time\ntime.sleep(600)\n")
        monkeypatch.syspath_prepend(str(tmp_path))
        table = "hanging_table"
    limit = 20.0
    began = time.monotonic()
    found = run_trials(plan(table), TimeLimits(budget=300, limit=limit, trial=100))
    assert time.monotonic() - began < limit + 10
    assert found.failed == "the trials failed: the time is up"


class Interrupted(Trials):
    """Trials whose process ends while it records steps or before that."""

    def _one_process(self, limit: float, bar: object) -> str:
        self.outcomes, self.wrong = [RIGHT], {"fastest": ""}
        return "the time is up"


@pytest.mark.parametrize("graphs", [True, False])
def test_graphs_that_were_not_tried_are_not_used(graphs: bool) -> None:
    trials = Interrupted(plan("none", graphs=graphs), LIMITS)
    trials.run()
    refused = GraphsOutcome("they were not tried: the time is up")
    assert trials.failed == "" and trials.graphs == ({"fastest": refused} if graphs else {})
    found = Findings(graphs=trials.graphs.get(trials.selection))
    assert found.applied_to(EngineOptions()).cuda_graphs is (False if graphs else None)


def tried(wrong: str, launched: GraphsOutcome, early: GraphsOutcome) -> Trials:
    """Return trials of which the fastest variants were right together and the early ones may be."""
    trials = Trials(plan("none", graphs=True), LIMITS)
    trials.wrong = {"fastest": "", "early": wrong}
    trials.graphs = {"fastest": launched, "early": early}
    return trials


def test_variants_that_start_early_are_used_if_they_make_a_step_faster() -> None:
    """By themselves they are no faster."""
    slow, fast, none = GraphsOutcome("", 3.0, 2.0), GraphsOutcome("", 3.0, 1.9), GraphsOutcome("no")
    assert tried("", slow, fast).selection == "early"
    assert tried("", fast, slow).selection == "fastest"
    assert tried("they race", slow, fast).selection == "fastest"
    assert tried("", slow, none).selection == "fastest"
    assert tried("", none, slow).selection == "early"
    assert tried("", none, none).selection == "fastest"
    found = Findings(conflicts={"early": "they race"})
    line = "kernels: the earliest variants are not used: they fail together: they race"
    assert [*found.lines()] == [line]


def test_graphs_that_were_asked_for_are_not_left_out_in_silence() -> None:
    with pytest.raises(ValueError, match="cuda_graphs cannot be used on this GPU: it broke; leave"):
        Findings(failed="it broke").applied_to(EngineOptions(cuda_graphs=True))


def short(refused: str) -> Findings:
    return Findings(outcomes=(RIGHT, Outcome("rms_norm", SHAPE, "other", refused)))


@pytest.mark.parametrize(
    ("outcome", "kept"),
    [
        (short("wrong: error 1.0e+00, at most 5.0e-02 allowed"), True),
        (short("OutOfMemoryError: CUDA out of memory."), False),
        (short("when recorded: OutOfMemoryError: CUDA out of memory."), False),
    ],
)
def test_what_was_refused_for_want_of_memory_is_tried_again_at_the_next_start(
    outcome: Findings, kept: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(start, "run_trials", lambda *_: outcome)
    file = FindingsFile({"gpu": "Test"}, tmp_path)
    said: list[str] = []
    found = read_or_try(plan("none"), file, say=said.append)
    assert found.outcomes == outcome.outcomes
    assert (file.read() == found) is kept
    assert ("the next start tries again" in said[-1]) is not kept


def test_a_failure_removes_what_was_found_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the next start would use what has just been found not to work."""
    file = FindingsFile({"gpu": "Test"}, tmp_path)
    file.write(Findings(key=file.key, outcomes=(RIGHT,)))
    monkeypatch.setattr(start, "run_trials", lambda *_: Findings(failed="it broke"))
    assert read_or_try(plan("none"), file, again=True, say=lambda _: None).failed == "it broke"
    assert file.read() is None
    file.remove()  # it may be gone already


def test_waiting_for_another_process_has_a_limit(tmp_path: Path) -> None:
    file = FindingsFile({"gpu": "Test"}, tmp_path)
    began = time.monotonic()
    with file.lock(60.0), file.lock(0.1):
        assert 0.1 < time.monotonic() - began < 30


def test_a_full_disk_leaves_no_part_of_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr("os.replace", full)
    with pytest.raises(OSError, match="no space left"):
        FindingsFile({"gpu": "Test"}, tmp_path).write(Findings())
    assert not [*tmp_path.iterdir()]


@pytest.fixture
def without_home(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    def no_home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(Path, "home", no_home)
    yield


@pytest.mark.usefixtures("without_home")
def test_a_user_without_a_home_has_a_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    assert cache_folder().is_relative_to(tmp_path)
