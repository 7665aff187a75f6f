"""`diffray doctor` names what it found, and one sentence for each thing to fix."""

import json
import os
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
from typer.testing import CliRunner

from diffray.cluster.cli import machine_checks
from diffray.cluster.cli.machine_checks import (
    Check,
    compiler,
    cpu,
    gpu,
    kernels,
    memory,
)
from diffray.cluster.cli.main import app
from diffray.components.checkpoints.checkpoint import load_model
from diffray.components.checkpoints.info import describe
from diffray.kernels import choose
from diffray.workers.bring_up.findings import Findings
from tests.helpers.paths import GOLDEN
from tests.helpers.quantized import weights_of

CPU = torch.device("cpu")
HERE = torch.backends.cpu.get_cpu_capability()


def run(*words: str) -> tuple[int, str, str]:
    done = CliRunner().invoke(app, ["doctor", *words])
    return done.exit_code, done.stdout, done.stderr


NAMES = ["CPU", "GPU", "kernels", "memory", "shared memory"]


def test_it_lists_what_it_found_and_what_to_fix(monkeypatch: pytest.MonkeyPatch) -> None:
    status, message, _ = run("demo", "--device", "cpu", "--no-bring-up")
    lines = message.splitlines()
    assert [line[:14].strip() for line in lines[: len(NAMES)]] == NAMES
    assert status == 0 and lines[len(NAMES) :] == ["", "Nothing to fix."]
    failed = Findings(failed="the check failed")
    monkeypatch.setattr("diffray.workers.bring_up.start.bring_up", lambda *_, **__: failed)
    status, message, _ = run("demo", "--device", "cpu")
    assert status == 1 and message.splitlines()[-1] == (
        "To fix: Triton's kernels cannot be used (the check failed); --kernels torch skips them."
    )
    status, _, message = run("./no-such-model", "--device", "cpu")
    assert status == 1
    waits, said = message.splitlines()
    assert waits.startswith("Checking this machine")
    assert said.startswith("diffray: there is no folder './no-such-model'")


def test_json_has_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    small = Check("shared memory", "none", "mount more")
    monkeypatch.setattr(machine_checks, "shared_memory", lambda: small)
    status, message, _ = run("--json", "--device", "cpu")
    found = json.loads(message)
    assert status == 1
    assert [check["name"] for check in found["checks"]] == NAMES
    assert found["checks"][-1] == {"name": "shared memory", "found": "none", "fix": "mount more"}
    assert found["refused"] == {} and found["failed"] == ""


@pytest.mark.skipif(not HERE.startswith("AVX"), reason="this processor has no AVX2")
def test_programs_in_c_need_a_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = "demo", "auto", CPU, torch.float32
    assert kernels(*asked) == Check("kernels", f"in C for {HERE}, else torch's")
    for requested, dtype in (("torch", torch.float32), ("auto", torch.float64)):
        assert kernels("demo", requested, CPU, dtype).found == "torch's"
    monkeypatch.setattr(machine_checks, "program", lambda: None)
    assert "no C compiler works" in kernels(*asked).found


@pytest.mark.skipif("DIFFRAY_TEST_AUTO" in os.environ, reason="the favoured dtype is simulated")
def test_the_cpu_s_features_and_the_dtype_they_favour(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"avx2": True, "amx_bf16": True})
    assert cpu().found.endswith("cores, amx_bf16, avx2; dtype auto is bfloat16")
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"avx2": True})
    assert cpu().found.endswith("cores, avx2; dtype auto is float32")
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"avx512_bf16": True})
    assert "float32, because without AMX" in cpu().found


CARD = "NVIDIA Test (80 GiB)"
# GPUs, ranks, the versions of the driver and of torch's CUDA, and what must be fixed.
GPUS = [
    (0, 1, None, None, ""),
    (0, 1, "570.1", None, "torch is built for CPUs only; install a CUDA build"),
    (0, 1, "570.1", "13.0", "torch sees no GPU; unset CUDA_VISIBLE_DEVICES, or install a driver"),
    (2, 2, "570.1", "13.0", ""),
    (2, 4, "570.1", "13.0", "--tp 4 needs 4 GPUs, and this machine has 2"),
]


def test_gpus_out_of_use_or_too_few_must_be_fixed(monkeypatch: pytest.MonkeyPatch) -> None:
    card = SimpleNamespace(name="NVIDIA Test", total_memory=80 << 30)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: card)
    for gpus, ranks, driver, cuda, fix in GPUS:
        monkeypatch.setattr(machine_checks, "driver_version", Mock(return_value=driver))
        monkeypatch.setattr(torch.version, "cuda", cuda)
        monkeypatch.setattr(torch.cuda, "is_available", Mock(return_value=bool(gpus)))
        monkeypatch.setattr(torch.cuda, "device_count", Mock(return_value=gpus))
        found = gpu(ranks)
        if gpus:
            assert found.found == f"{', '.join([CARD] * gpus)}; driver {driver}, CUDA {cuda}"
        assert found.fix.startswith(fix) and bool(found.fix) is bool(fix)


def test_a_gpu_that_triton_cannot_use_must_be_fixed(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda, gemma = torch.device("cuda"), str(GOLDEN / "diffusion_gemma")
    monkeypatch.setattr(choose, "find_spec", lambda _: None)
    found = kernels("demo", "auto", cuda, torch.bfloat16)
    assert found.found == "torch's only" and found.fix == (
        "Triton's kernels cannot be used (Triton is not installed; pip install 'diffray[triton]'); "
        "--kernels torch skips them"
    )
    for model, requested in ((gemma, "auto"), ("demo", "torch")):
        assert kernels(model, requested, cuda, torch.bfloat16) == Check("kernels", "torch's")
    monkeypatch.setattr(choose, "find_spec", lambda name: name)
    monkeypatch.setattr(choose, "_interpreted", lambda: False)
    assert "the device is cpu" in kernels("demo", "triton", CPU, torch.float32).fix
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (7, 5))
    assert "has compute capability 7.5" in kernels("demo", "auto", cuda, torch.float16).fix
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    assert kernels("demo", "auto", cuda, torch.float16) == Check("kernels", "Triton's")


def test_triton_needs_a_c_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("CC", "")
    assert compiler().fix == "Triton's kernels need a C compiler; install gcc"
    (tmp_path / "gcc").write_text("#!/bin/sh\n")
    (tmp_path / "gcc").chmod(0o700)
    assert compiler() == Check("compiler", str(tmp_path / "gcc"))


def test_scarce_resources_must_be_fixed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert memory(2 << 20, CPU, 1).fix == ""
    monkeypatch.setattr(machine_checks, "available_memory", lambda: 1 << 20)
    found = memory(2 << 20, CPU, 2)
    assert found.found == "1 MiB free; the weights take 2 MiB"
    assert found.fix.startswith("the model does not fit; choose a smaller dtype")
    assert "--shm-size=2g" in machine_checks.shared_memory(tmp_path / "missing").fix
    assert machine_checks.shared_memory(tmp_path).found.endswith(f" free in {tmp_path}")


def test_quantized_experts_take_a_byte_each() -> None:
    path = str(GOLDEN / "llada_moe")
    plain, small = (describe(path, q).bytes_in_memory["bfloat16"] for q in (None, "experts_int8"))
    model = load_model(path, dtype="bfloat16", progress=False, quantization="experts_int8")
    routed = [(w.kept.values_EOI, w.kept.scale_EOG) for w in weights_of(model, "experts")]
    assert plain - small == sum(v.numel() - s.nbytes for v, s in routed) > 0
    assert small == sum(each.nbytes for each in (*model.parameters(), *model.buffers()))


def test_refused_kernels_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    found = Findings(refused={"rms_norm": "it crashed (SIGABRT)"})
    monkeypatch.setattr("diffray.workers.bring_up.start.bring_up", lambda *_, **__: found)
    status, message, _ = run("demo", "--device", "cpu")
    line = "kernels: torch's rms_norm is used: it crashed (SIGABRT)"
    assert status == 0 and message.splitlines()[-3:] == [line, "", "Nothing to fix."]
    _, message, _ = run("demo", "--device", "cpu", "--json")
    assert json.loads(message)["refused"] == found.refused
