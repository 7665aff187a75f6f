"""The layers' kernels against their plain definitions."""

import pytest
import torch
from torch import Tensor
from torch.nn.functional import silu

from diffray.kernels.experts import experts_forward
from diffray.kernels.norm import rms_norm
from diffray.kernels.rope import rope_tables, rotate
from diffray.kernels.rope_scaling import Rope
from diffray.kernels.router import grouped_sigmoid_topk, softmax_topk


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


def test_a_token_without_an_expert_here_gets_zero() -> None:
    x, w31, w2 = torch.ones(2, 8), torch.ones(2, 8, 8), torch.ones(2, 8, 4)
    out = experts_forward(x, w31, w2, torch.tensor([[-1, 2], [0, 5]]), torch.ones(2, 2))
    assert not out[0].any() and bool(out[1].all())


def test_experts_of_a_token_do_not_hang_on_the_others() -> None:
    torch.manual_seed(0)
    x, w31, w2 = torch.randn(9, 6).double(), torch.randn(4, 10, 6), torch.randn(4, 6, 5)
    weights, ids = torch.rand(9, 4).double().topk(2)
    args = (w31.double(), w2.double())
    alone = experts_forward(x[3:4], *args, ids[3:4], weights[3:4])
    torch.testing.assert_close(experts_forward(x, *args, ids, weights)[3:4], alone)


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


def test_softmax_weights_are_not_renormalised_and_a_bias_enters_them() -> None:
    logits = torch.tensor([[2.0, 1.0, 0.0, -1.0]])
    ids, weights = softmax_topk(logits, None, 2)
    assert ids.tolist() == [[0, 1]]
    torch.testing.assert_close(weights, logits.softmax(-1)[:, :2])
    ids, weights = softmax_topk(logits, torch.tensor([0.0, 0.0, 0.0, 1.0]), 1)
    assert ids.tolist() == [[3]]
    torch.testing.assert_close(weights, logits.softmax(-1)[:, 3:] + 1)


def test_groups_are_judged_by_their_two_best_and_the_bias_only_chooses() -> None:
    # Group 0 has the single best expert, group 1 the best pair.
    logits = torch.tensor([[4.0, -4.0, 1.5, 1.4]])
    ids, weights = grouped_sigmoid_topk(
        logits, torch.zeros(4), 2, num_groups=2, groups_chosen=1, scale=2.5
    )
    assert ids.tolist() == [[2, 3]]
    torch.testing.assert_close(weights.sum(), torch.tensor(2.5))
    biased, same = grouped_sigmoid_topk(
        logits, torch.tensor([0.0, 2.0, 0, 0]), 2, num_groups=2, groups_chosen=1, scale=1.0
    )
    assert biased.tolist() == [[1, 0]]
    scores = logits.sigmoid()[0, [1, 0]]
    torch.testing.assert_close(same[0], scores / scores.sum())
