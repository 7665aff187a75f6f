"""The GPU programs, as far as a machine without a GPU can run them."""

import json
import os
import subprocess
import sys
from types import ModuleType

import pytest
import torch

from tests.triton_device import DEVICE  # isort: skip
from benchmarks.gpu import check_kernels, generate, step_time, time_kernels
from benchmarks.gpu.cases import Work
from benchmarks.gpu.check_kernels import check
from benchmarks.gpu.shapes import SHAPES, TOY
from benchmarks.gpu.step import make_step
from diffray.kernels.choose import TORCH, choose_kernels, triton_kernels

WORK = Work(2, 5, 21)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
@pytest.mark.parametrize("program", [check_kernels, time_kernels, step_time, generate])
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
    torch.manual_seed(0)
    step = make_step(TOY[name], WORK, torch.float32, DEVICE)
    pools = [pool.clone() for pool in (step.keys_LSGD, step.values_LSGD)]
    plain = step.run(TORCH)
    stored = [pool.clone() for pool in (step.keys_LSGD, step.values_LSGD)]
    for pool, before in zip((step.keys_LSGD, step.values_LSGD), pools, strict=True):
        assert not torch.equal(pool, before)
        pool.copy_(before)
    fused = step.run(triton_kernels())
    assert torch.equal(fused.ids_R, plain.ids_R)
    for ours, theirs in zip(fused[1:], plain[1:], strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-4)
    for pool, expected in zip((step.keys_LSGD, step.values_LSGD), stored, strict=True):
        torch.testing.assert_close(pool, expected, atol=1e-4, rtol=1e-4)


def test_a_step_with_quantized_experts_is_near_to_one_without() -> None:
    steps = []
    for kind in (None, torch.int8):
        torch.manual_seed(0)
        steps.append(make_step(TOY["toy-moe"], WORK, torch.float32, DEVICE, kind))
    wide, narrow = (step.run(TORCH).logsumexp_R for step in steps)
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
        softmax_topk=lambda *args: (right.softmax_topk(*args)[0].flip(1), args[0][:, : args[2]]),
    )
    rows = check(TOY["toy-moe"], WORK, torch.float32, DEVICE, wrong)
    found = {row["kernel"] for row in rows if not row["right"]}
    assert found == {"rms_norm", "paged_attention", "router"}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "gigabytes"), [("llada-moe-7b-a1b", 14.2), ("llada-8b", 15.5), ("llada2-mini", 27.9)]
)
def test_a_step_reads_the_weights_of_the_published_models(name: str, gigabytes: float) -> None:
    shape = SHAPES[name]._replace(layers=2)
    two = make_step(shape, Work(1, 64, 64), torch.bfloat16, "meta").bytes()
    one = make_step(shape._replace(layers=1), Work(1, 64, 64), torch.bfloat16, "meta").bytes()
    total = one + (SHAPES[name].layers - 1) * (two - one)
    assert total / 1e9 == pytest.approx(gigabytes, rel=0.05)


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="on a GPU the checks compile them")
def test_kernels_compile_for_hopper_and_fit_it() -> None:
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "benchmarks.gpu.compile_kernels", "--quick"]
    command += ["--shape", "llada2-mini"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    kernels = json.loads(done.stdout)["kernels"]
    assert len({row["kernel"] for row in kernels}) == 12
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
