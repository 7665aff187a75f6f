"""Kernels are compiled in threads before they are launched; no GPU is needed to compile."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

# Not imported: Triton decides when it is imported whether this process interprets its kernels.
if importlib.util.find_spec("triton") is None:
    pytest.skip("Triton is not installed: pip install 'diffray[triton]'", allow_module_level=True)

PROGRAM = """
import threading
from types import SimpleNamespace
import torch, triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction
from diffray.kernels.triton.compile_ahead import compiled_ahead
from diffray.kernels.triton.norm import rms_norm

target = GPUTarget("cuda", 90, 32)
driver.set_active(SimpleNamespace(
    get_current_target=lambda: target,
    get_current_device=lambda: 0,
    get_current_stream=lambda _device=0: 0,
    get_active_torch_device=lambda: torch.device("meta"),
))
launch, compiled_in = JITFunction.run, set()
compiler = triton.compiler.compile

def noted(*args, **options):
    compiled_in.add(threading.current_thread().name)
    return compiler(*args, **options)

triton.compiler.compile = noted

@triton.jit
def broken(x_ptr):
    tl.store(x_ptr, no_such_name)

x, weight = (torch.empty(*size, device="meta") for size in ((4, 64), (64,)))
with compiled_ahead(2):
    rms_norm(x, weight, 1e-5)
    broken[(1,)](x)
assert JITFunction.run is launch
assert compiled_in and "MainThread" not in compiled_in, compiled_in

def warm_up(self, *args, grid, warmup, **options):
    return launch(self, *args, grid=grid, warmup=True, **options)

compiled_in.clear()
JITFunction.run = warm_up
rms_norm(x, weight, 1e-5)
assert not compiled_in
try:
    broken[(1,)](x).metadata
except Exception as error:
    print(type(error).__name__)
"""


@pytest.mark.long
def test_what_was_compiled_ahead_is_not_compiled_again_and_errors_are_kept(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment |= {"TRITON_CACHE_DIR": str(tmp_path), "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, str(program)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert (done.returncode, done.stdout.strip()) == (0, "CompilationError"), done.stderr
