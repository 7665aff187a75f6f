"""The layers' kernels against their plain definitions."""

import pytest
import torch

from diffray.kernels.norm import rms_norm


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_norm_computes_wide_then_casts_then_scales(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x, weight = torch.randn(5, 3, 16).to(dtype), torch.randn(3, 16).to(dtype)
    wide = x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + 1e-5)
    expected = wide.to(dtype) * weight
    torch.testing.assert_close(rms_norm(x, weight, 1e-5), expected)
