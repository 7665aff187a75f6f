"""`diffray plan` shows the sums, and where nothing fits a change that makes room."""

import json
import re
from typing import Any

import pytest
from typer.testing import CliRunner

from diffray.cluster.cli.main import app
from tests.helpers.paths import GOLDEN

LLADA = str(GOLDEN / "llada")


def run(*words: str) -> tuple[int, str]:
    done = CliRunner().invoke(app, ["plan", *words])
    assert done.stderr == "", done.stderr
    return done.exit_code, done.stdout


def found(*words: str) -> dict[str, Any]:
    status, said = run(*words, "--json")
    plan: dict[str, Any] = json.loads(said)
    assert status == int(plan["fix"] != "") == int(plan["requests"] == 0)
    return plan


def test_people_read_what_json_has() -> None:
    words = "demo --gpu h200 --tp 2 -q int8 --context 512 --tokens-per-forward 3.5".split()
    plan = found(*words)
    assert (plan["device"], plan["ranks"], plan["quantization"]) == ("H200", 2, "int8")
    assert plan["num_pages"] == 2 * 16 * 512 // 16 + 1  # two contexts for each of 16, and page 0
    status, said = run(*words)
    rows = dict(re.split(r" {2,}", line, maxsplit=1) for line in said.split("\n\n")[0].splitlines())
    assert status == 0 and rows["device"] == "H200, for each of 2 ranks"
    assert rows["K/V cache"].endswith(f"pages of 16 tokens: {plan['num_pages']:,}")
    assert rows["requests at once"].startswith("16, as many as --max-num-seqs allows")
    for step in plan["steps"]:
        speed = f"{step['ms']:.3g} ms, {step['tokens_per_s']:,.0f} tokens/s"
        assert rows[f"step of {step['requests']:,}"].startswith(speed)
    assert "No GPU has confirmed this plan." in said.splitlines()[-1]


def test_without_a_gpu_s_name_it_plans_for_this_machine_or_for_a_size() -> None:
    here = found("demo", "--device", "cpu", "--dtype", "float32")
    assert (here["device"], here["steps"], here["taken"]) == ("this machine's CPU", [], 0)
    size = found("demo", "--gpu-memory", "80GiB")
    assert (size["memory"], size["steps"], size["dtype"]) == (80 << 30, [], "bfloat16")
    smaller = found("demo", "--gpu", "H200", "--gpu-memory", "80GiB")
    assert smaller["left"] == size["left"] and len(smaller["steps"]) == 3


# Bytes beside CUDA for a model whose weights take 3.3 MiB in float32, its context 4 MiB of K/V and
# 8 MiB of activations; and the changes that make room.
ROOM = [
    (6 << 20, set()),
    (10 << 20, {"--tp", "--context"}),
    (18 << 20, {"--tp", "--context", "--quantization"}),
]


@pytest.mark.parametrize(("beside", "named"), ROOM)
def test_each_change_that_it_names_makes_room(beside: int, named: set[str]) -> None:
    words = LLADA, "--gpu-memory", str((1 << 30) + beside), "--dtype", "float32", "--no-cuda-graphs"
    plan = found(*words, "--max-num-seqs", "1")
    changes = re.findall(r"(--[\w-]+) (\w+)", plan["fix"])
    assert named == {flag for flag, _ in changes}, plan
    for flag, value in changes:
        assert found(*words, "--max-num-seqs", "1", flag, value)["requests"] == 1
    assert named or plan["fix"].endswith("choose a device with more memory")
    assert run(*words, "--max-num-seqs", "1")[1].splitlines()[-1] == f"To fix: {plan['fix']}."
