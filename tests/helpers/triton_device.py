"""Where Triton's kernels are tested: on the CUDA device, or else in Triton's interpreter.

A test module imports this one before any kernel, because Triton decides when it is imported.
"""

import os
from typing import Any

import pytest
import torch

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
if DEVICE.type == "cpu":
    os.environ["TRITON_INTERPRET"] = "1"
pytest.importorskip("triton", reason="Triton is not installed: pip install 'diffray[triton]'")


def on_device(part: Any) -> Any:
    """Return a copy of a tensor, or of a named tuple of such, on the device."""
    if isinstance(part, torch.Tensor):
        return part.clone().to(DEVICE)
    return type(part)(*map(on_device, part))
