"""Where Triton's kernels are tested: on the CUDA device, or else in Triton's interpreter.

A test module imports this one before any kernel, because Triton decides when it is imported.
"""

import os

import pytest
import torch

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
if DEVICE.type == "cpu":
    os.environ["TRITON_INTERPRET"] = "1"
pytest.importorskip("triton", reason="Triton is not installed: pip install 'diffray[triton]'")
