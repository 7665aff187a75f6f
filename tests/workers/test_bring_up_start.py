"""What a start on a GPU checks, reads and keeps, with a stand-in for the GPU and for the check."""

import time
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from tests.helpers import triton_device  # isort: skip  # noqa: F401
import diffray
from diffray.components import backend
from diffray.components.mesh import Mesh
from diffray.kernels.user_cache import cache_folder
from diffray.workers.bring_up import start
from diffray.workers.bring_up.check import CheckPlan
from diffray.workers.bring_up.child import TimeLimits
from diffray.workers.bring_up.findings import Findings, FindingsFile
from diffray.workers.bring_up.one_layer import Sizes
from diffray.workers.bring_up.start import bring_up, key_of, read_or_check
from diffray.workers.engine_options import EngineOptions
from tests.helpers.paths import GOLDEN
from tests.helpers.tiny_checkpoints import LLADA2_MOE, LLADA_MOE

MODEL = str(GOLDEN / "llada_moe")


@pytest.fixture
def checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[CheckPlan]:
    """Stand in for a GPU; return the plans that are checked on it."""
    plans: list[CheckPlan] = []

    def check(plan: CheckPlan, limits: TimeLimits) -> Findings:
        assert limits == TimeLimits()
        plans.append(plan)
        return Findings(refused={"rms_norm": "wrong"}, seconds=40.0)

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "NVIDIA Test 9000")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    monkeypatch.setattr(backend, "driver_version", lambda: "570.1")
    monkeypatch.setattr(start, "run_check", check)
    return plans


def test_a_first_start_checks_what_the_engine_will_run(checked: list[CheckPlan]) -> None:
    said: list[str] = []
    setup = EngineOptions(quantization="experts_int8", kv_cache_dtype="int8", page_size=32)
    found = bring_up(MODEL, setup, Mesh(), say=said.append)
    (plan,) = checked
    assert plan.device == "cuda" and plan.table == start.TABLE
    sizes = plan.sizes
    assert (sizes.dtype, sizes.quantization) == ("bfloat16", "experts_int8")
    assert (sizes.page_size, sizes.kv_cache_dtype, sizes.ranks) == (32, "int8", 1)
    assert sizes.config["num_experts"] > 0
    assert found.refused == {"rms_norm": "wrong"}
    known = {"gpu": "NVIDIA Test 9000", "capability": "9.0", "driver": "570.1"}
    known |= {"torch": torch.__version__, "diffray": diffray.__version__}
    assert known.items() <= found.key.items()
    assert said == [
        "kernels: checking them on NVIDIA Test 9000, once; this takes up to a minute",
        "kernels: torch's rms_norm is used: wrong",
        "kernels: checked in 40 s, 1 refused",
    ]


def test_later_starts_read_what_the_first_found(checked: list[CheckPlan]) -> None:
    first = bring_up(MODEL, EngineOptions(), Mesh(), say=lambda _: None)
    said: list[str] = []
    for options in ({}, {"bring_up": False}):
        assert bring_up(MODEL, EngineOptions(**options), Mesh(), say=said.append) == first
    assert len(checked) == 1 and not said
    bring_up(MODEL, EngineOptions(dtype="float16"), Mesh(), say=said.append)
    assert len(checked) == 2  # of another dtype nothing is known
    bring_up(MODEL, EngineOptions(), Mesh(), again=True, say=said.append)
    assert len(checked) == 3


@pytest.mark.parametrize(
    "options", [{"bring_up": False}, {"kernels": "torch"}, {"device": "cpu"}], ids=str
)
def test_unasked_or_without_a_gpu_nothing_is_checked(
    options: dict[str, Any], checked: list[CheckPlan], tmp_path: Path
) -> None:
    assert bring_up(MODEL, EngineOptions(**options), Mesh()) == Findings()
    assert not checked and not [*tmp_path.rglob("*.json")]


FILE_KEY = {"gpu": "NVIDIA Test 9000", "driver": "1.2"}
RIGHT = Findings(key=FILE_KEY, refused={"rms_norm": "wrong"})


def plan(*, config: dict[str, Any] = LLADA_MOE, **more: Any) -> CheckPlan:
    sizes = Sizes(config=config, dtype="float32", **more)
    return CheckPlan(sizes=sizes, device="cpu", table="none")


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
    for text in ("", "{", "[]", "null", '{"refused": 1}', "\0\xff", "{}"):
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
    assert cache_folder("kernels") == tmp_path / "diffray/kernels"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache_folder("kernels") == Path.home() / ".cache/diffray/kernels"
    no_home = RuntimeError("Could not determine home directory.")
    monkeypatch.setattr(Path, "home", Mock(side_effect=no_home))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    assert cache_folder("kernels").is_relative_to(tmp_path)


def test_the_key_names_everything_that_the_findings_depend_on() -> None:
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
    ],
)
def test_what_was_refused_for_want_of_memory_is_checked_again_at_the_next_start(
    refused: str, kept: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    outcome = Findings(refused={"rms_norm": refused})
    monkeypatch.setattr(start, "run_check", lambda *_: outcome)
    file = FindingsFile(FILE_KEY, tmp_path)
    said: list[str] = []
    found = read_or_check(plan(), file, say=said.append)
    assert found.refused == outcome.refused
    assert (file.read() == found) is kept
    assert ("the next start checks again" in said[-1]) is not kept


def test_a_failure_is_not_kept_and_removes_what_was_found_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Else the next start would use what has just been found not to work."""
    file = FindingsFile(FILE_KEY, tmp_path)
    file.write(RIGHT)
    monkeypatch.setattr(start, "run_check", lambda *_: Findings(failed="it broke"))
    for _ in range(2):  # the second time it is gone already
        assert read_or_check(plan(), file, again=True).failed == "it broke"
        assert file.read() is None
    last = capsys.readouterr().err.splitlines()[-1]
    assert last == "diffray: kernels: only torch's are used: it broke"
