"""Loading a quantized model takes little more memory than the model, whatever is on the disk."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from benchmarks.random_checkpoint import Shape, config_of, draw_weights
from diffray.components.checkpoints.info import describe
from diffray.components.checkpoints.quantize import quantize_checkpoint
from tests.helpers.paths import ROOT

# Most of it can be quantized: the vocabulary is small.
SHAPE = Shape(hidden=1536, layers=8, heads=12, kv_heads=12, mlp=4096, vocab=256)

# The memory that is the process's own; pages of the file are the system's, which takes them back.
LOAD = """
import re, sys, threading, time
from pathlib import Path
from diffray.components.checkpoints.checkpoint import load_model
from diffray.components.backend import keep_freed_memory

def own():
    return int(re.search(r"RssAnon:\\s+(\\d+)", Path("/proc/self/status").read_text())[1]) << 10

def watch():
    while not done:
        peak[0] = max(peak[0], own())
        time.sleep(0.0005)

keep_freed_memory()
done, path, given = [], sys.argv[1], sys.argv[2] or None
# Libraries take memory when they are first used.
load_model(sys.argv[3], dtype="bfloat16", device="cpu", progress=False, quantization=given)
peak = [before := own()]
thread = threading.Thread(target=watch)
thread.start()
model = load_model(path, dtype="bfloat16", device="cpu", progress=False, quantization=given)
done.append(True)
thread.join()
size = sum(each.nbytes for each in (*model.parameters(), *model.buffers()))
print(peak[0] - before, size)
"""


def write(folder: Path, shape: Shape) -> Path:
    config = config_of("llada", shape) | {"max_sequence_length": 64}
    torch.manual_seed(0)
    weights = draw_weights(config, lambda _, size: (torch.randn(size) * 0.02).bfloat16())
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    save_file(weights, folder / "model.safetensors")
    return folder


def load(path: Path, quantization: str, small: Path) -> tuple[int, int]:
    """Return by how much a process grew at most, and the size of what it has loaded."""
    command = [sys.executable, "-c", LOAD, str(path), quantization, str(small)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=300)
    assert done.returncode == 0, done.stderr
    peak, size = map(int, done.stdout.split())
    return peak, size


@pytest.mark.long
def test_loading_int4_peaks_at_its_size(tmp_path: Path) -> None:
    path = write(tmp_path / "model", SHAPE)
    small = Shape(hidden=128, layers=1, heads=2, kv_heads=2, mlp=128, vocab=256)
    tiny = write(tmp_path / "tiny", small)
    assert describe(path).bytes_in_memory["bfloat16"] > 400e6
    peak, size = load(path, "int4_g128", tiny)
    assert 100e6 < size < 150e6
    assert peak < 1.1 * size
    stored = quantize_checkpoint(path, tmp_path / "int4", "int4_g128", progress=False)
    own = quantize_checkpoint(tiny, tmp_path / "tiny4", "int4", progress=False)
    peak, same = load(stored, "", own)
    assert same == size
    assert peak < 1.1 * size
