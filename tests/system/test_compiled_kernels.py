"""What the kernels take of a GPU, as compiled for one that need not be there."""

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

TILED = "_gate_up", "_down", "_byte_product", "_read_keys", "_weigh_head"
# The most registers and KB of shared memory that they take on Hopper, of 255 and 227.
HOPPER = {
    "_grouped_topk": (88, 8),
    "_join_splits": (152, 1),
    "_join_tiles": (168, 1),
    "_list_pairs": (112, 8),
    "_multiply": (72, 16),
    "_norm_row": (40, 1),
    "_reward_row": (64, 1),
    "_rotate_heads": (56, 4),
    "_round_heads": (32, 1),
    "_round_row": (40, 1),
    "_settle_row": (144, 1),
    "_softmax_topk": (64, 8),
    "_sum_norm_row": (64, 1),
    "_sum_pairs": (40, 1),
    "_sum_parts": (40, 1),
    "_weigh_logits": (128, 1),
    "_byte_product 32x64x128 w4 s4": (112, 48),
    "_byte_product 32x64x128 w4 s4 half": (112, 48),
    "_byte_product 64x64x128 w4 s4": (96, 104),
    "_byte_product 64x64x128 w4 s4 half": (168, 88),
    "_byte_product 128x128x64 w8 s4": (120, 104),
    "_byte_product 128x128x64 w8 s4 half": (136, 88),
    "_down 16x64x128 w4 s3": (112, 40),
    "_down 16x64x128 w4 s3 half": (112, 24),
    "_down 32x64x128 w4 s3": (144, 48),
    "_down 64x128x64 w8 s4": (128, 96),
    "_down 64x128x64 w8 s4 half": (128, 72),
    "_down 128x128x64 w8 s4": (168, 128),
    "_down 128x128x128 w8 s3": (248, 160),
    "_down 128x128x128 w8 s3 half": (216, 160),
    "_gate_up 16x64x128 w4 s3": (184, 72),
    "_gate_up 16x64x128 w4 s3 half": (144, 40),
    "_gate_up 32x64x128 w4 s3": (192, 80),
    "_gate_up 64x128x64 w8 s4": (184, 160),
    "_gate_up 64x128x64 w8 s4 half": (184, 104),
    "_gate_up 128x128x64 w8 s4": (255, 192),
    "_gate_up 128x128x128 w8 s3": (255, 224),
    "_gate_up 128x128x128 w8 s3 half": (255, 192),
    "_read_keys 32x32x128 w4 s3": (184, 39),
    "_read_keys 32x64x128 w4 s2": (224, 68),
    "_read_keys 32x64x128 w4 s3": (144, 45),
    "_read_keys 64x32x128 w4 s3": (255, 53),
    "_read_keys 64x64x128 w4 s2": (255, 96),
    "_read_keys 64x64x128 w4 s3": (192, 81),
    "_weigh_head 32x64x64 w4 s4": (128, 36),
    "_weigh_head 32x128x64 w4 s4": (168, 60),
    "_weigh_head 64x64x64 w8 s4": (128, 64),
    "_weigh_head 64x128x64 w4 s4": (224, 96),
    "_weigh_head 128x64x64 w8 s4": (224, 96),
    "_weigh_head 128x128x64 w8 s4": (224, 128),
}
A_FEW = 8  # bytes that may be spilled around a loop, which cost nothing
# More than a few. Of bytes for many rows an H200 runs no other tile faster.
HOPPER_SPILLS = {
    "_gate_up 128x128x128 w8 s3": 56,
    "_gate_up 128x128x128 w8 s3 half": 88,
}
AMPERE_SPILLS = {
    "_gate_up 128x128x64 w8 s4": 184,
    "_gate_up 128x128x128 w8 s3": 288,
    "_read_keys 64x64x128 w4 s2": 16,
    "_read_keys 64x64x128 w4 s3": 48,
}


def compiled(capability: int, path: Path) -> list[dict[str, Any]]:
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "benchmarks.gpu.compile_kernels"]
    command += ["--shape", "llada-moe-7b-a1b", "llada2-mini"]
    command += ["--capability", str(capability), "--out", str(path)]
    subprocess.run(command, check=True, env=environment)
    rows: list[dict[str, Any]] = json.loads(path.read_text())["kernels"]
    return rows


def name_of(row: dict[str, Any]) -> str:
    """Return the Triton function and, if it multiplies many tiles, which one."""
    name, of = row["kernel"], row["constants"]
    if name not in TILED:
        return str(name)
    sizes = (of[size] for size in ("ROWS", "COLUMNS", "KEYS", "DEPTH", "BLOCK") if size in of)
    half = " half" if of.get("HALF") else ""
    return f"{name} {'x'.join(map(str, sizes))} w{row['warps']} s{row['stages']}{half}"


def test_kernels_fit_hopper_and_wait_for_the_kernel_before(tmp_path: Path) -> None:
    rows = compiled(90, tmp_path / "report.json")
    assert {name_of(row) for row in rows} == set(HOPPER)
    for row in rows:
        name = name_of(row)
        registers, kilobytes = HOPPER[name]
        assert row["registers"] <= registers, row
        assert row["shared_bytes"] <= kilobytes * 1024, row
        spilled = row["stack_bytes"] + row["local_bytes"]
        assert spilled <= HOPPER_SPILLS.get(name, A_FEW), row
        assert row["waits_for_previous"] == 1, row
        if row["kernel"] in ("_gate_up", "_down", "_byte_product"):
            assert row["fetches"] and row["products"] and row["asynchronous_copies"], row


def test_kernels_compile_for_ampere_where_none_starts_early(tmp_path: Path) -> None:
    rows = compiled(80, tmp_path / "report.json")
    # Only whole bytes are multiplied.
    float8 = {name for name in HOPPER if name.endswith(" half") or name == "_round_row"}
    assert {name_of(row) for row in rows} == HOPPER.keys() - float8
    for row in rows:
        assert row["shared_bytes"] <= 163 * 1024, row
        spilled = row["stack_bytes"] + row["local_bytes"]
        assert spilled <= AMPERE_SPILLS.get(name_of(row), A_FEW), row
        assert row["waits_for_previous"] == 0, row


def test_kernels_fit_the_cards_with_the_least_shared_memory(tmp_path: Path) -> None:
    rows = compiled(89, tmp_path / "report.json")
    assert {"_gate_up", "_down", "_byte_product", "_weigh_head"} <= {row["kernel"] for row in rows}
    for row in rows:
        assert row["shared_bytes"] <= 99 * 1024, row
