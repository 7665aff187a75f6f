"""The layers' kernels against their plain definitions."""

import pytest
import torch
from torch import Tensor
from torch.nn.functional import silu

from diffray.kernels.experts import experts_forward
from diffray.kernels.norm import rms_norm
from diffray.kernels.rope import rope_tables, rotate
from diffray.kernels.rope_scaling import Rope


def one_by_one(x: Tensor, w31: Tensor, w2: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    out = torch.zeros_like(x)
    for t in range(len(x)):
        for e, weight in zip(ids[t].tolist(), weights[t], strict=True):
            if 0 <= e < len(w31):
                up, gate = (w31[e] @ x[t]).chunk(2)
                out[t] += weight.to(x.dtype) * (w2[e] @ (silu(gate) * up))
    return out


@pytest.mark.parametrize(
    ("dtype", "tolerance"),
    [(torch.float64, 1e-12), (torch.float32, 1e-5), (torch.bfloat16, 0.1)],
)
@pytest.mark.parametrize(("first", "num_experts"), [(0, 8), (2, 3)])
@pytest.mark.parametrize(("hidden", "width"), [(32, 16), (6, 5)])
def test_experts_sorted_equal_experts_one_by_one(
    dtype: torch.dtype, tolerance: float, first: int, num_experts: int, hidden: int, width: int
) -> None:
    torch.manual_seed(0)
    x = torch.randn(11, hidden).to(dtype)
    w31, w2 = torch.randn(8, 2 * width, hidden), torch.randn(8, hidden, width)
    w31, w2 = (w[first : first + num_experts].to(dtype) / hidden**0.5 for w in (w31, w2))
    weights, ids = torch.randn(11, 8).softmax(-1).topk(3)
    args = (x, w31, w2, ids - first, weights)
    torch.testing.assert_close(
        experts_forward(*args), one_by_one(*args), atol=tolerance, rtol=tolerance
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_norm_computes_wide_then_casts_then_scales(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x, weight = torch.randn(5, 3, 16).to(dtype), torch.randn(3, 16).to(dtype)
    wide = x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + 1e-5)
    expected = wide.to(dtype) * weight
    torch.testing.assert_close(rms_norm(x, weight, 1e-5), expected)


@pytest.mark.parametrize("rotated", [4, 8])
def test_rotation_depends_on_distance_alone(rotated: int) -> None:
    torch.manual_seed(0)
    cos, sin = (t.unsqueeze(1) for t in rope_tables(Rope(1e4, 50), rotated, torch.float64))
    q, k = torch.randn(2, 1, 1, 8, dtype=torch.float64)

    def score(at: int, to: int) -> Tensor:
        return (rotate(q, cos[[at]], sin[[at]]) * rotate(k, cos[[to]], sin[[to]])).sum()

    torch.testing.assert_close(score(3, 10), score(40, 47))
    assert torch.equal(rotate(q, cos[[9]], sin[[9]])[..., rotated:], q[..., rotated:])
    torch.testing.assert_close(rotate(q, cos[[0]], sin[[0]]), q)
