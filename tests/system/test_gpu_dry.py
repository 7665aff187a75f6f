"""The first run on a GPU, rehearsed with the packages of a machine that is lent for its GPU."""

import json
import subprocess
import sys

import pytest
import torch

from tests.helpers.paths import ROOT

pytestmark = [
    pytest.mark.long,
    pytest.mark.timeout(600),  # it installs torch
    pytest.mark.skipif(torch.cuda.is_available(), reason="on a GPU it runs"),
]


def test_it_lists_its_cases_compiles_its_kernels_and_packs_what_it_has() -> None:
    make = ["make", "--no-print-directory", "gpu-dry", f"VENV={sys.prefix}"]
    made = subprocess.run(make, cwd=ROOT, capture_output=True, text=True)
    assert made.returncode == 0, made.stdout + made.stderr
    for told in ("check_kernels      192 cases", "generate_toy", "gpu/check_engine_cpu.json"):
        assert told in made.stdout
    compiled = json.loads((ROOT / "build/gpu-dry/compiled.json").read_text())
    assert compiled["facts"]["triton"] == "3.6.0" and len(compiled["kernels"]) > 50
