"""What variants of the kernels take of a GPU, as compiled for one that need not be there."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

# Not imported: Triton decides when it is imported whether this process interprets its kernels.
if importlib.util.find_spec("triton") is None:
    pytest.skip("Triton is not installed: pip install 'diffray[triton]'", allow_module_level=True)

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(torch.cuda.is_available(), reason="on a GPU the checks compile them"),
]

# The most registers and KB of shared memory that their kernels take on Hopper, of 255 and 227.
Kernels = dict[str, tuple[int, int]]
NORM: Kernels = {"_sum_norm_row": (72, 1)}
ROUND, SUM, JOIN = {"_round_row": (40, 1)}, {"_sum_parts": (40, 1)}, {"_join_tiles": (40, 1)}
NARROW, WIDE = "64x64x128 w4 s4", "64x128x128 w8 s3"
EXPERTS, LINEAR = "experts_add_norm triton", "quantized_linear triton"
HOPPER: dict[str, Kernels] = {
    "softmax_router triton fused pdl": {"_multiply": (80, 16), "_softmax_topk": (64, 8)},
    "grouped_sigmoid_router triton fused pdl": {"_multiply": (80, 16), "_grouped_topk": (64, 8)},
    f"{EXPERTS} pdl 16x64x128 w4 s3": {"_gate_up": (192, 72), "_down": (128, 40)} | NORM,
    f"{EXPERTS} pdl 32x64x128 w4 s3": {"_gate_up": (255, 80), "_down": (160, 48)} | NORM,
    f"{EXPERTS} pdl 64x64x64 w4 s4": {"_gate_up": (192, 96), "_down": (136, 64)} | NORM,
    f"{EXPERTS} pdl 128x128x64 w8 s4": {"_gate_up": (255, 192), "_down": (176, 128)} | NORM,
    f"{EXPERTS} pdl 128x128x128 w8 s3": {"_gate_up": (255, 224), "_down": (255, 160)} | NORM,
    "float8_experts_forward triton pdl 16x64x128 w4 s3": ROUND | {"_sum_pairs": (48, 1)},
    "float8_experts_forward scaled_grouped_mm pdl": {
        "_gather_row": (40, 1),
        "_gate_row": (72, 1),
        "_sum_pairs": (48, 1),
    },
    "attend triton pdl 64x64x128 w4 s3": {
        "_rotate_heads": (64, 4),
        "_read_keys": (192, 81),
        "_join_splits": (152, 1),
    },
    "quantized_attend triton pdl 64x64x128 w4 s2": {
        "_round_heads": (40, 1),
        "_read_keys": (255, 97),
    },
    # Of 4 bits the default; more keys would spill.
    "quantized_attend triton pdl 64x32x128 w4 s3": {
        "_round_heads": (40, 1),
        "_read_keys": (255, 57),
    },
    f"{LINEAR} pdl {NARROW}": {"_byte_product": (96, 104)} | SUM,
    f"{LINEAR} half pdl {NARROW}": {"_byte_product": (176, 88)} | SUM | ROUND,
    f"{LINEAR} pdl {WIDE}": {"_byte_product": (128, 112)} | SUM,
    f"{LINEAR} half pdl {WIDE}": {"_byte_product": (168, 96)} | SUM | ROUND,
    f"{LINEAR} pdl 128x128x64 w8 s4": {"_byte_product": (128, 104)},
    f"{LINEAR} half pdl 128x128x64 w8 s4": {"_byte_product": (144, 88)} | ROUND,
    "confidence triton pdl 64x128x64 w4 s4": {"_weigh_head": (224, 96)},
    "linear_add_norm triton pdl": {"_norm_row": (40, 1)},
    "reward triton pdl": {"_reward_row": (72, 1)},
    "settle triton pdl": {"_settle_row": (152, 1)},
    "confidence triton after product pdl": {"_weigh_logits": (144, 1)} | JOIN,
}
# The most bytes that they spill. Of bytes for many rows an H200 runs no other tile faster.
SPILLS = {f"{EXPERTS} pdl 128x128x128 w8 s3": 96}
A_FEW = 8  # registers around a loop, which cost nothing
# On Ampere no kernel starts early, and only whole bytes are multiplied.
AMPERE = [
    variant.replace(" pdl", "")
    for variant in HOPPER
    if " half" not in variant and not variant.startswith("float8")
]
# On the card bring-up decides.
AMPERE_SPILLS = {
    f"{EXPERTS} 128x128x64 w8 s4": 184,
    f"{EXPERTS} 128x128x128 w8 s3": 288,
    "attend triton 64x64x128 w4 s3": 48,
    "quantized_attend triton 64x64x128 w4 s2": 16,
}


def compiled(capability: int, variants: list[str], path: Path) -> list[dict[str, Any]]:
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    pattern = "^(" + "|".join(variants) + ")$"
    command = [sys.executable, "-m", "benchmarks.gpu.compile_kernels", "--variant", pattern]
    command += ["--shape", "llada-moe-7b-a1b", "llada2-mini"]
    command += ["--capability", str(capability), "--out", str(path)]
    subprocess.run(command, check=True, env=environment)
    rows: list[dict[str, Any]] = json.loads(path.read_text())["kernels"]
    return rows


def test_variants_fit_hopper_and_wait_for_the_kernel_before(tmp_path: Path) -> None:
    rows = compiled(90, [*HOPPER], tmp_path / "report.json")
    found = {(row["variant"], row["kernel"]) for row in rows}
    assert found >= {(variant, kernel) for variant, of in HOPPER.items() for kernel in of}
    for row in rows:
        registers, kilobytes = HOPPER[row["variant"]].get(row["kernel"], (255, 227))
        assert row["registers"] <= registers, row
        assert row["shared_bytes"] <= kilobytes * 1024, row
        spilled = row["stack_bytes"] + row["local_bytes"]
        assert spilled <= SPILLS.get(row["variant"], A_FEW), row
        assert row["waits_for_previous"] == 1, row
        if row["kernel"] in ("_gate_up", "_down", "_byte_product"):
            assert row["fetches"] and row["products"] and row["asynchronous_copies"], row


def test_variants_compile_for_ampere_where_no_kernel_starts_early(tmp_path: Path) -> None:
    rows = compiled(80, AMPERE, tmp_path / "report.json")
    assert {row["variant"] for row in rows} == set(AMPERE)
    assert any("experts_add_norm int8" in row["where"] for row in rows)
    for row in rows:
        assert row["shared_bytes"] <= 163 * 1024, row
        spilled = row["stack_bytes"] + row["local_bytes"]
        assert spilled <= AMPERE_SPILLS.get(row["variant"], A_FEW), row
        assert row["waits_for_previous"] == 0, row
