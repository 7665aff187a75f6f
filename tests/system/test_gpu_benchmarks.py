"""The GPU programs, as far as a machine without a GPU can run them."""

import importlib
import json
import os
import signal
import subprocess
import sys
import tarfile
import time
from argparse import Namespace
from collections.abc import Callable
from itertools import product
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from tests.helpers.triton_device import DEVICE  # isort: skip
from benchmarks.golden import MASKED, cases_of
from benchmarks.gpu import __main__ as all_of_them
from benchmarks.gpu import (
    bring_up,
    check_engine,
    check_kernels,
    generate,
    program,
    step_time,
    yardstick,
)
from benchmarks.gpu.cases import listed
from benchmarks.gpu.check_kernels import check
from benchmarks.gpu.engine import experts_met, random_engine, run_to_the_end, scripted
from benchmarks.gpu.floor import Text, parts, step_ms
from benchmarks.gpu.measure import kernel_table
from benchmarks.gpu.random_model import config_of, quantization_of, random_model
from benchmarks.gpu.shapes import SHAPES, TOY, Shape, Sparse, Work
from diffray.components.experts import Experts
from diffray.components.mesh import Mesh
from diffray.components.models.registry import build_model
from diffray.components.quantization import parse_quantization
from diffray.components.roofline import Ceilings
from diffray.kernels.choose import TORCH, Kernels, triton_kernels
from diffray.kernels.router import Routing
from diffray.workers.batch_plan import BatchPlan
from diffray.workers.bring_up.findings import Findings
from diffray.workers.engine import Engine
from diffray.workers.graphs import Graphs, Recorded
from tests.helpers.paths import ROOT

pytestmark = pytest.mark.long

WORK = Work(2, 5, 21)
PROGRAMS = [bring_up, check_kernels, check_engine, step_time, generate, yardstick]


@pytest.fixture
def refusal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., str]:
    """Return a function that runs a program and returns the sentence with which it refuses."""

    def refused(program: ModuleType, *arguments: str) -> str:
        monkeypatch.setattr(sys, "argv", ["program", *arguments])
        with pytest.raises(SystemExit) as end:
            program.main()
        told = capsys.readouterr()
        assert end.value.code == 2 and told.out == "" and told.err.count("\n") == 1
        return told.err

    return refused


def test_what_is_missing_is_named_in_one_sentence(
    refusal: Callable[..., str], tmp_path: Path
) -> None:
    nowhere = str(tmp_path / "nowhere")
    assert "nowhere has no NAME_experts.py" in refusal(yardstick, "--from", nowhere)


def test_the_check_tells_right_kernels_from_wrong_ones() -> None:
    def flipped(*args: Any) -> Routing:
        return Routing(TORCH.softmax_router(*args).ids_TK.flip(1), TORCH.softmax_router(*args)[1])

    def wrong_ones(name: str, kernels: Kernels) -> set[str]:
        every = [*listed([name], [WORK], [torch.float32])]
        wanted = {"add_norm", "rms_norm", "rotate_and_store", "paged_attention", "confidence"}
        assert wanted <= {which.kernel for which in every}
        return {each.kernel for each in every if not check(each, DEVICE, kernels)["right"]}

    assert wrong_ones("toy-dense", triton_kernels()) == set()
    assert wrong_ones("toy-grouped", triton_kernels()) == set()
    wrong = TORCH._replace(
        rms_norm=lambda x, weight, eps: TORCH.rms_norm(x, weight, eps) * 1.01,
        paged_attention=lambda *args: TORCH.paged_attention(*args) * torch.nan,
        softmax_router=flipped,
    )
    assert wrong_ones("toy-moe", wrong) == {"rms_norm", "paged_attention", "router"}


MANY_EXPERTS = Shape(4, 64, 4, 4, 16, 16, True, 0, 300, 0, Sparse(64, 8, 16, 0, 0, 0, 0))


def test_random_weights_spread_tokens_over_experts() -> None:
    """All masks share an embedding: a trained model distinguishes them, random weights do not."""
    torch.manual_seed(0)
    model = random_model(MANY_EXPERTS, 256, 256, torch.device("cpu"), TORCH, "float32")
    engine = random_engine(model, max_num_seqs=1)
    met = experts_met(engine, [scripted(0, MANY_EXPERTS, 64, 128, 32, 64, "dual")], 1, "fixed")
    assert met["distinct_experts"] > 63 and met["fullest_expert"] < 24


@pytest.mark.parametrize("name", TOY)
def test_a_scripted_generation_takes_the_steps_it_was_asked_for(name: str) -> None:
    """Through the engine that serves, on a CPU, over torch's kernels."""
    argv = "--device cpu --dtype float32 --kernels torch --prompt 9 --tokens 31 --block 8"
    argv += f" --runs 1 --rows 1 3 --rate 3.87 --decoder fixed credit --shape {name}"
    methods = {**vars(Engine)}, {**vars(BatchPlan)}
    rows = [case() for case in generate.plan(generate.parser().parse_args(argv.split())).values()]
    assert ({**vars(Engine)}, {**vars(BatchPlan)}) == methods
    assert [(r["rows"], r["decoder"]) for r in rows] == [*product((1, 3), ("fixed", "credit"))]
    for row in rows:
        # Eight steps; a block-causal model's first block begins in the prompt and is one more.
        assert row["forwards"] == rows[0]["forwards"] and row["forwards"] in (8, 9)
        assert row["tokens"] == 31 * row["rows"] and 4 <= row["replays"] <= row["forwards"]
        assert all(0 < row["host_ms"][part] < 1000 for part in ("before", "beside", "after"))
        assert row["tokens_per_forward"] == pytest.approx(31 / row["forwards"])
        assert ("distinct_experts" in row) == (TOY[name].sparse is not None)


@pytest.mark.parametrize("cache", ["dual", "vicinity"])
def test_as_many_full_steps_run_as_predicted(cache: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of six in each block."""
    shape, prompt, tokens, block = TOY["toy-moe"], 64, 96, 12
    model = random_model(shape, 256, 256, torch.device("cpu"), TORCH, "float32")
    engine = random_engine(model, max_num_seqs=1)
    forward = Mock(side_effect=model.forward)
    monkeypatch.setattr(model, "forward", forward)
    request = scripted(0, shape, prompt, tokens, 6 * tokens // block, block, cache)
    for _ in run_to_the_end(engine, [request]):
        pass
    lengths = [len(call.args[0]) for call in forward.call_args_list]
    text = Text(1, 6, cache, "bfloat16", prompt, tokens, block)
    assert lengths.count(prompt + tokens) == text.over_everything
    assert len(lengths) == 6 * tokens // block


def test_a_profile_counts_calls() -> None:
    x = torch.randn(32, 32)
    table = kernel_table(lambda: (x @ x @ x).relu(), "cpu")
    calls = {row["kernel"]: row["calls"] for row in table["kernels"]}
    assert (calls["aten::mm"], calls["aten::relu"]) == (2, 1)
    assert 0 < table["kernels"][-1]["us"] <= table["kernels"][0]["us"] <= table["span_us"]


def test_a_refused_kernel_fails_bring_up(monkeypatch: pytest.MonkeyPatch) -> None:
    found = [Findings(), Findings(refused={"settle": "wrong"}), Findings(failed="late")]
    check = Mock(side_effect=found)
    monkeypatch.setattr(bring_up, "run_check", check)
    args = Namespace(shape=["toy-moe"], weights=["bfloat16", "int8", "float8"])
    assert [case()["right"] for case in bring_up.plan(args).values()] == [True, False, False]
    quantized = [call.args[0].sizes.quantization for call in check.call_args_list]
    assert quantized == [None, "experts=int8", "experts=fp8"]


OF_THE_SERVER = {"ray", "transformers", "tokenizers", "typer", "fastapi", "yaml", "msgspec"}
OF_THE_ENGINE = {"pydantic", "safetensors", "tqdm"}
STEPS_AND_CHECKS = """
import torch
from benchmarks.gpu.cases import listed
from benchmarks.gpu.check_kernels import check
from benchmarks.gpu.random_model import WEIGHTS, counted_experts
from benchmarks.gpu.shapes import TOY, Work
from benchmarks.gpu.step_time import make_step
from diffray.kernels.choose import TORCH, triton_kernels
assert triton_kernels().name == "triton"
work, cpu = Work(2, 5, 21), torch.device("cpu")
for weights in WEIGHTS:
    step = make_step(TOY["toy-moe"], work, cpu, TORCH, "float32", weights)
    with counted_experts(step.model) as met:
        step.run()
    assert met["distinct_experts"] > 1
for which in listed(["toy-moe"], [work], [torch.float32]):
    assert check(which, cpu, TORCH)["right"]
"""


@pytest.mark.parametrize(
    ("code", "missing"),
    [
        (
            "from benchmarks.gpu import check_kernels, step_time, yardstick, __main__",
            OF_THE_ENGINE,
        ),
        (STEPS_AND_CHECKS, OF_THE_ENGINE),
        ("from benchmarks.gpu import bring_up, check_engine, generate", set[str]()),
        ("from benchmarks.gpu import floor", {"torch", "triton"} | OF_THE_ENGINE),
    ],
    ids=["programs", "steps and checks", "the engine's", "predictions"],
)
def test_they_need_no_more_than_they_say(code: str, missing: set[str]) -> None:
    """A machine lent for its GPU has torch, and often little else."""
    without = f"import sys; sys.modules.update(dict.fromkeys({missing | OF_THE_SERVER!r}))\n"
    subprocess.run([sys.executable, "-c", without + code], check=True, timeout=600)


def plan(args: Namespace) -> dict[str, Callable[[], dict[str, Any]]]:
    """Cases of which most end badly."""

    def fails() -> dict[str, Any]:
        raise torch.OutOfMemoryError("no room\nleft")

    def lacks() -> dict[str, Any]:
        return {"right": bool(importlib.import_module("not_here"))}

    def killed() -> dict[str, Any]:
        os.kill(os.getpid(), signal.SIGKILL)
        return {}

    def hangs() -> dict[str, Any]:
        time.sleep(600)
        return {}

    return {
        "fine": lambda: {"right": True},
        "wrong": lambda: {"right": False},
        "fails": fails,
        "lacks": lacks,
        "aborts": os.abort,
        "fine again": lambda: {"right": True},
        "killed": killed,
        "hangs": hangs,
        "told": lambda: {"told": 7},
    }


class TestProgram:
    def test_one_bad_case_hides_nothing(self, tmp_path: Path) -> None:
        out = tmp_path / "report.json"
        out.write_text("of an earlier run")
        args = program.arguments("").parse_args(["--out", str(out), "--case-seconds", "25"])
        args.device = "cpu"
        with pytest.raises(SystemExit, match="6 of 9 cases failed"):
            program.run(plan, args, str)
        report = json.loads(out.read_text())
        assert report["complete"] and report["wrong"] == 6
        rows = {row["case"]: row for row in report["rows"]}
        assert list(rows) == list(plan(args))
        failures = {name: row["failure"] for name, row in rows.items() if "failure" in row}
        assert failures == {
            "fails": "OutOfMemoryError: no room left",
            "lacks": "ModuleNotFoundError: No module named 'not_here'",
            "aborts": "the process ended with SIGABRT",
            "killed": "the process ended with SIGKILL",
            "hangs": "no answer for 25 s",
        }
        judged = {name: row.get("right") for name, row in rows.items() if name not in failures}
        assert judged == {"fine": True, "wrong": False, "fine again": True, "told": None}
        assert {"commit", "sources", "diffray", "torch", "triton"} <= report["facts"].keys()


def ended_at_the_first_row(
    command: list[str], report: Path, number: signal.Signals
) -> tuple[int, str]:
    """Send a program this signal once its report has a row; return its status and what it says."""
    # As a script's `&` does: without it SIGINT would not be ignored.
    script = ["sh", "-c", 'trap "" INT; exec "$@"', "sh", *command]
    out, both = subprocess.PIPE, subprocess.STDOUT
    with subprocess.Popen(script, cwd=ROOT, text=True, stdout=out, stderr=both) as process:
        while not (report.exists() and json.loads(report.read_text())["rows"]):
            assert process.poll() is None
            time.sleep(0.1)
        process.send_signal(number)
        told, _ = process.communicate(timeout=60)
    return process.returncode, told


class TestCheckEngine:
    def test_golden_tokens_are_right(
        self, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], tmp_path: Path
    ) -> None:
        arguments = ["--device", "cpu", "--family", "llada2_moe", "--out", str(tmp_path / "out")]
        monkeypatch.setattr(sys, "argv", ["check_engine", *arguments])
        check_engine.main()
        told = capfd.readouterr().out
        assert "17 and 17 of 17 equal" in told and "WRONG" not in told
        report = json.loads((tmp_path / "out").read_text())
        assert report["complete"] and report["wrong"] == 0
        assert report["program"] == "check_engine"

    @pytest.mark.parametrize("family", MASKED)
    def test_the_longest_cases_fit(self, family: str, monkeypatch: pytest.MonkeyPatch) -> None:
        longest = max(cases_of(family), key=lambda case: len(case["prompt"]) + case["gen_length"])
        monkeypatch.setattr(check_engine, "cases_of", lambda _: [longest])
        way = check_engine.Way("float32", "torch", None)
        assert check_engine.check_golden(family, way, torch.device("cpu"))["right"]

    def test_a_wrong_token_is_found(self, monkeypatch: pytest.MonkeyPatch) -> None:
        cases = cases_of("llada2_moe")[:4]
        cases[3]["tokens"][5] += 1
        monkeypatch.setattr(check_engine, "cases_of", lambda family: cases)
        way = check_engine.Way("float32", "torch", None)
        found = check_engine.check_golden("llada2_moe", way, torch.device("cpu"))
        assert found["right"] is False and "3 and 3 of 4 equal" in found["told"]

    def test_replays_are_compared_and_counted(self, monkeypatch: pytest.MonkeyPatch) -> None:
        cpu = torch.device("cpu")
        right = check_engine.check_logits("llada_moe", cpu)
        assert right["right"] and "replayed" in right["told"]
        assert check_engine.check_graphs("llada_moe", cpu)["right"]
        monkeypatch.setattr(Graphs, "fit", lambda *_: None)
        assert check_engine.check_graphs("llada_moe", cpu)["right"] is False
        monkeypatch.undo()
        forward = Recorded.forward
        monkeypatch.setattr(Recorded, "forward", lambda recorded: forward(recorded) * 1.1)
        assert check_engine.check_logits("llada_moe", cpu)["right"] is False


RUNNER = """
from benchmarks.gpu import __main__ as all_of_them
all_of_them.runs = lambda: [all_of_them.Run(*{run})]
all_of_them.need_cuda = lambda: None
{more}
all_of_them.main()
"""


class TestAllOfThem:
    @pytest.mark.skipif(torch.cuda.is_available(), reason="they would run")
    def test_every_command_is_one_that_the_program_takes(
        self,
        refusal: Callable[..., str],
        capsys: pytest.CaptureFixture[str],
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        """What it then lacks is a GPU."""
        monkeypatch.setattr(all_of_them, "FOREIGN", ".")
        monkeypatch.setattr(yardstick, "_others", lambda _: ["vllm"])
        monkeypatch.setattr(sys, "argv", ["all", "--out", "nowhere", "--dry-run"])
        all_of_them.main()
        assert capsys.readouterr().out.count("\n") == len(all_of_them.runs())
        programs = {each.__name__.rsplit(".", 1)[-1]: each for each in PROGRAMS}
        for run in all_of_them.runs():
            told = refusal(programs[run.program], *run.arguments.split())
            assert "no CUDA device" in told
        assert programs.keys() == {run.program for run in all_of_them.runs()}

    def test_nothing_of_an_earlier_run_is_left(
        self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        """Nor where there is no time for a program; what was not asked for is left."""
        monkeypatch.setattr(all_of_them, "need_cuda", lambda: None)
        for name in ("step.json", "step.log", "kernels.json"):
            (tmp_path / name).write_text("{}")
        argv = ["all", "--out", str(tmp_path), "--only", "step", "--minutes", "0"]
        monkeypatch.setattr(sys, "argv", argv)
        all_of_them.main()
        assert "not started" in capsys.readouterr().out
        assert sorted(file.name for file in tmp_path.iterdir()) == ["kernels.json", "summary.txt"]

    @pytest.mark.rotate(1)
    @pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
    def test_an_ended_run_packs_what_it_has(self, number: signal.Signals, tmp_path: Path) -> None:
        out = tmp_path / "results"
        code = RUNNER.format(run=("fine", 300, "check_engine", "--device cpu"), more="")
        command = [sys.executable, "-c", code, "--out", str(out)]
        status, told = ended_at_the_first_row(command, out / "fine.json", number)
        assert status == 1 and "ended before it was done" in told
        with tarfile.open(tmp_path / "results.tar.gz") as packed:
            packed.extractall(tmp_path / "unpacked", filter="data")
        unpacked = tmp_path / "unpacked" / "results"
        report = json.loads((unpacked / "fine.json").read_text())
        assert not report["complete"] and 0 < len(report["rows"]) < report["cases"]
        assert "ended before it was done" in (unpacked / "summary.txt").read_text()

    def test_a_program_ends_with_a_runner_that_is_killed(self, tmp_path: Path) -> None:
        sleeps = "import os, time, pathlib; pathlib.Path('pid').write_text(str(os.getpid()))"
        asleep = [sys.executable, "-c", f"{sleeps}; time.sleep(99)"]
        more = f"all_of_them.command = lambda _: {asleep}"
        code = RUNNER.format(run=("asleep", 99, "check_engine", ""), more=more)
        command = [sys.executable, "-c", code, "--out", str(tmp_path / "results")]
        paths = os.environ | {"PYTHONPATH": str(ROOT)}
        with subprocess.Popen(command, cwd=tmp_path, env=paths) as runner:
            pid = tmp_path / "pid"
            while not (pid.exists() and pid.read_text()):
                assert runner.poll() is None
                time.sleep(0.1)
            runner.kill()
        program = Path("/proc") / pid.read_text()
        while program.exists() and "Z" not in (program / "stat").read_text().split()[2]:
            time.sleep(0.1)

    def test_program_ends_are_told(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        reports_and_hangs = """
import json, pathlib, sys, time
report = {"complete": False, "cases": 9, "wrong": 0, "rows": [{"case": "a"}]}
pathlib.Path(sys.argv[sys.argv.index("--out") + 1]).write_text(json.dumps(report))
time.sleep(600)
"""
        missing = "ModuleNotFoundError: No module named 'not_here'"
        for code, said in (
            ("raise SystemExit(2)", "FAILED (2), no report: it printed nothing"),
            ("import not_here", f"FAILED (1), no report: {missing}"),
            (reports_and_hangs, "out of time; INCOMPLETE: 1 of 9 cases"),
        ):
            command = Mock(return_value=[sys.executable, "-c", code])
            monkeypatch.setattr(all_of_them, "command", command)
            run = all_of_them.Run("run", 1, "check_engine", "")
            assert all_of_them.carry_out(run, 10, tmp_path).endswith(f" s  {said}")


@pytest.mark.parametrize(
    ("name", "weights"), [*((name, "bfloat16") for name in SHAPES), ("llada-8b", "int8")]
)
def test_the_floor_is_of_the_bytes_of_the_published_models(name: str, weights: str) -> None:
    shape, work = SHAPES[name], Work(1, 64, 64)
    model = build_model(config_of(shape, 64), Mesh(), torch.bfloat16, TORCH)
    if (quantized := quantization_of(shape, weights)) is not None:
        model.quantize(parse_quantization(quantized))
    read = sum(p.nbytes for p in model.parameters()) - model.embedding.weight_VH.nbytes
    for module in model.modules():
        if isinstance(module, Experts) and shape.sparse is not None:
            share = shape.distinct_experts(work.tokens) / shape.sparse.experts
            read -= int((1 - share) * sum(p.nbytes for p in module.parameters()))
    floor = sum(part.calls * part.bytes for part in parts(shape, work, weights))
    assert read < floor < 1.05 * read  # activations are moved too


def test_a_floor_is_by_bytes_for_few_tokens_and_by_operations_for_many() -> None:
    shape, found = SHAPES["llada-8b"], Ceilings(4e12, 800e12)
    few, many = (step_ms(shape, Work(n, 64, 1024), "bfloat16", found) for n in (1, 32))
    assert few == pytest.approx(16e9 / 4e12 * 1e3, rel=0.05)
    assert many == pytest.approx(2 * 8e9 * 2048 / 800e12 * 1e3, rel=0.1)
    moe = SHAPES["llada-moe-7b-a1b"]
    faster, slower = (
        Text(1, 3.87, "dual", weights, 128, 1024, 64).seconds(moe, found)
        for weights in ("float8", "bfloat16")
    )
    assert 0.5 < faster < slower < 1.2


STAND_IN = """
from diffray.kernels.experts import ExpertWeights, experts
from diffray.kernels.router import Routing
CONFIGS = {4: {"double": 2, "same": 1}, 400: {}}
def experts_forward(x, w31, w2, ids, weights, config):
    return config * experts(x, ExpertWeights(w31, w2), Routing(ids, weights))
"""


def test_the_yardstick_judges_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "stand_in_experts.py").write_text(STAND_IN)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr(yardstick, "ceilings", lambda: Ceilings(1e9, 1e12))
    monkeypatch.setattr(yardstick, "graphed", lambda run: run)
    monkeypatch.setattr(yardstick, "median_s", timed_once)
    args = Namespace(folder=tmp_path, shape=["toy-moe"], tokens=[9], runs=1)
    whose = ["ours", "torch", "stand_in"]
    assert [*yardstick.plan(args)] == [f"toy-moe 9 tokens, {name}" for name in whose]
    rows = [yardstick.timed(args, "toy-moe", 9, name, "cpu") for name in whose]
    assert [row["right"] for row in rows] == [True, True, False]
    assert [len(row["configs"]) for row in rows] == [1, 1, 2]
    errors = {each["config"]: each["error"] for each in rows[2]["configs"]}
    assert errors == {"double": pytest.approx(1), "same": 0}
    # Two matrices, of 40 x 48 and 48 x 20, for each of the experts met, all five of them.
    assert rows[0]["distinct_experts"] == 5
    assert rows[0]["configs"][0]["share"] == pytest.approx(5 * 60 * 48 * 4 / 1e9 / 1e-3)


def timed_once(run: Callable[[], object], _runs: int) -> float:
    run()
    return 1e-3
