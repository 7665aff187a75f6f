"""The GPU programs, as far as a machine without a GPU can run them."""

import json
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

from tests.helpers.triton_device import DEVICE  # isort: skip
from benchmarks.golden import cases_of
from benchmarks.gpu import __main__ as all_of_them
from benchmarks.gpu import check_engine, check_kernels, generate, step_time, time_kernels
from benchmarks.gpu.cases import Rival, Work, cases
from benchmarks.gpu.check_kernels import check
from benchmarks.gpu.model import config_of
from benchmarks.gpu.shapes import SHAPES, TOY
from benchmarks.gpu.step import bytes_read, make_step
from diffray.components.mesh import Mesh
from diffray.components.models.registry import build_model
from diffray.kernels.choose import TORCH, choose_kernels, triton_kernels
from diffray.kernels.router import Routing

WORK = Work(2, 5, 21)
PROGRAMS = [check_kernels, check_engine, time_kernels, step_time, generate]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
@pytest.mark.parametrize("program", PROGRAMS)
def test_without_a_gpu_they_say_so_in_one_sentence(
    program: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["program"])
    with pytest.raises(SystemExit) as end:
        program.main()
    told = capsys.readouterr()
    assert end.value.code == 2
    assert told.out == "" and told.err.count("\n") == 1 and "no CUDA device" in told.err


@pytest.mark.slow
@pytest.mark.parametrize("name", TOY)
def test_a_step_is_the_same_with_both_sets_of_kernels(name: str) -> None:
    steps, pools = [], []
    for kernels in (TORCH, triton_kernels()):
        torch.manual_seed(0)
        steps.append(make_step(TOY[name], WORK, "float32", DEVICE, kernels))
        kv = steps[-1].kv
        pools.append([pool.clone() for pool in (kv.keys_LSGD, kv.values_LSGD)])
    plain, fused = (step.run() for step in steps)
    assert torch.equal(fused.ids_R, plain.ids_R)
    for ours, theirs in zip(fused[1:], plain[1:], strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-4)
    stored = [(step.kv.keys_LSGD, step.kv.values_LSGD) for step in steps]
    for before, expected, found in zip(pools[0], *stored, strict=True):
        assert not torch.equal(before, expected)
        torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)


def test_a_step_with_quantized_experts_is_near_to_one_without() -> None:
    steps = []
    for kind in (None, torch.int8):
        torch.manual_seed(0)
        steps.append(make_step(TOY["toy-moe"], WORK, "float32", DEVICE, TORCH, kind))
    wide, narrow = (step.run().logsumexp_R for step in steps)
    assert 0 < float((wide - narrow).norm() / wide.norm()) < 0.01


@pytest.mark.slow
@pytest.mark.parametrize("name", ["toy-dense", "toy-grouped"])
def test_the_check_passes_what_is_right(name: str) -> None:
    rows = list(check(TOY[name], WORK, torch.float32, DEVICE, triton_kernels()))
    assert {row["kernel"]: row for row in rows if not row["right"]} == {}
    kernels = {row["kernel"].split()[0] for row in rows}
    wanted = {"add_norm", "rms_norm", "rotate_and_store", "paged_attention", "confidence"}
    assert wanted <= kernels


def test_the_check_finds_what_is_wrong() -> None:
    right = TORCH
    wrong = right._replace(
        rms_norm=lambda x, weight, eps: right.rms_norm(x, weight, eps) * 1.01,
        paged_attention=lambda *args: right.paged_attention(*args) * torch.nan,
        softmax_router=lambda *args: Routing(
            right.softmax_router(*args).ids_TK.flip(1), right.softmax_router(*args).weights_TK
        ),
    )
    rows = check(TOY["toy-moe"], WORK, torch.float32, DEVICE, wrong)
    found = {row["kernel"] for row in rows if not row["right"]}
    assert found == {"rms_norm", "paged_attention", "router"}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "gigabytes"), [("llada-moe-7b-a1b", 14.2), ("llada-8b", 15.5), ("llada2-mini", 27.9)]
)
def test_a_step_reads_the_weights_of_the_published_models(name: str, gigabytes: float) -> None:
    shape, work = SHAPES[name], Work(1, 64, 64)
    model = build_model(config_of(shape, 64), Mesh(), torch.bfloat16, TORCH)
    assert bytes_read(model, shape, work) / 1e9 == pytest.approx(gigabytes, rel=0.05)


@pytest.mark.parametrize("name", TOY)
def test_attention_s_rival_is_given_what_it_takes(name: str) -> None:
    """Torch runs it on a GPU alone; without one it tells the shape of what it would return."""
    shape = TOY[name]
    rivals: list[Rival] = []
    for window in (8, 16):
        work = Work(2, window, 48)
        for case in cases(shape, work, torch.bfloat16, "meta"):
            rivals += case.rivals
            for rival in case.rivals:
                read = rival.run()
                assert isinstance(read, torch.Tensor)
                assert read.shape == (work.tokens, shape.heads, shape.head_dim)
    # A window of two blocks cannot be told it.
    assert len(rivals) == (1 if shape.block else 2)


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="on a GPU the checks compile them")
def test_kernels_compile_for_hopper_and_fit_it() -> None:
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "benchmarks.gpu.compile_kernels", "--quick"]
    command += ["--shape", "llada2-mini"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    kernels = json.loads(done.stdout)["kernels"]
    assert len({row["kernel"] for row in kernels}) == 11
    assert [row for row in kernels if row["shared_bytes"] > 227 * 1024] == []
    assert [row for row in kernels if row["stack_bytes"] + row["local_bytes"] > 64] == []
    experts = next(row for row in kernels if row["kernel"] == "_gate_up")
    assert experts["products"] and experts["asynchronous_copies"]


def test_a_device_gets_the_kernels_that_it_can_run() -> None:
    assert choose_kernels("auto", torch.device("cpu"), torch.float32).name == "torch"
    assert triton_kernels()._fields == TORCH._fields


@pytest.mark.slow
@pytest.mark.parametrize("name", TOY)
def test_a_scripted_generation_takes_the_steps_it_was_asked_for(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Through the engine that serves, on a CPU, over torch's kernels."""
    argv = "program --device cpu --dtype float32 --kernels torch --prompt 9 --tokens 31 --block 8"
    argv += f" --runs 1 --rows 1 3 --accepted 3.87 --shape {name}"
    monkeypatch.setattr(sys, "argv", argv.split())
    generate.main()
    lines, report = capsys.readouterr().out.split("{", 1)
    assert lines.count("tokens/s") == 2
    alone, three = json.loads("{" + report)["generations"]
    # Eight steps; a block-causal model's first block begins in the prompt and is one more.
    assert alone["forwards"] == three["forwards"] and alone["forwards"] in (8, 9)
    assert (alone["tokens"], three["tokens"]) == (31, 93)
    assert alone["tokens_per_forward"] == pytest.approx(31 / alone["forwards"])


@pytest.mark.parametrize("name", TOY)
def test_a_round_of_the_engine_is_timed_inside_a_block(name: str) -> None:
    found = step_time.timed_engine(TOY[name], Work(2, 8, 27), TORCH, torch.device("cpu"), "float32")
    assert 0 < found["engine_ms"] < 10_000


NOT_THERE = """
import sys, importlib.abc
class Finder(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {missing}:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Finder())
from benchmarks.gpu import {program}
"""
OF_THE_SERVER = {"ray", "transformers", "tokenizers", "typer", "fastapi", "yaml", "msgspec"}
OF_THE_ENGINE = {"pydantic", "safetensors", "tqdm"}


@pytest.mark.parametrize(
    ("program", "missing"),
    [
        ("check_kernels", OF_THE_SERVER | OF_THE_ENGINE),
        ("time_kernels", OF_THE_SERVER | OF_THE_ENGINE),
        ("step_time", OF_THE_SERVER | OF_THE_ENGINE),
        ("check_engine", OF_THE_SERVER),
        ("generate", OF_THE_SERVER),
    ],
)
def test_they_need_no_more_than_they_say(program: str, missing: set[str]) -> None:
    """A machine lent for its GPU has torch, and often little else."""
    code = NOT_THERE.replace("{missing}", repr(missing)).replace("{program}", program)
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


class TestCheckEngine:
    def test_golden_tokens_are_right_and_a_wrong_one_is_found(
        self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
    ) -> None:
        arguments = ["--device", "cpu", "--family", "llada2_moe", "--out", str(tmp_path / "out")]
        monkeypatch.setattr(sys, "argv", ["check_engine", *arguments])
        check_engine.main()
        told = capsys.readouterr().out
        assert "17 and 17 of 17 equal" in told and "WRONG" not in told
        report = json.loads((tmp_path / "out").read_text())
        assert report["wrong"] == 0 and len(report["checks"]) == told.count("\n") - 1

        cases = cases_of("llada2_moe")
        cases[3]["tokens"][5] += 1
        monkeypatch.setattr(check_engine, "cases_of", lambda family: cases)
        with pytest.raises(SystemExit, match="2 of"):
            check_engine.main()
        assert "16 and 16 of 17 equal" in capsys.readouterr().out

    def test_an_error_is_a_wrong_answer(self) -> None:
        def broken() -> check_engine.Found:
            raise RuntimeError("no room\nleft")

        assert check_engine.judged(broken) == (False, "RuntimeError: no room left")


class TestAllOfThem:
    @pytest.mark.skipif(torch.cuda.is_available(), reason="they would run")
    def test_every_command_is_one_that_the_program_takes(
        self, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(sys, "argv", ["all", "--out", "nowhere", "--dry-run"])
        all_of_them.main()
        assert capsys.readouterr().out.count("\n") == len(all_of_them.RUNS)
        programs = {program.__name__.rsplit(".", 1)[-1]: program for program in PROGRAMS}
        for run in all_of_them.RUNS:
            monkeypatch.setattr(sys, "argv", [run.program, *run.arguments.split()])
            with pytest.raises(SystemExit) as end:  # for want of a GPU, not of a flag
                programs[run.program].main()
            assert "no CUDA device" in capsys.readouterr().err and end.value.code == 2

    def test_what_fails_is_told_and_stops_nobody(self, tmp_path: Path) -> None:
        right = all_of_them.Run("fine", "check_engine", "--device cpu --family llada2_moe", 1)
        assert "right; see fine.log" in all_of_them.carry_out(right, 100, tmp_path)
        assert json.loads((tmp_path / "fine.json").read_text())["wrong"] == 0
        wrong = all_of_them.Run("typo", "check_engine", "--family nobody", 1)
        assert "FAILED (2): " in all_of_them.carry_out(wrong, 100, tmp_path)
        assert "FAILED (out of time)" in all_of_them.carry_out(right, 0.5, tmp_path)
