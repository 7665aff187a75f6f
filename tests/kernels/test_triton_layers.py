"""Norms, rotation and storing in Triton against torch."""

import pytest
import torch

from tests.helpers.triton_device import DEVICE  # isort: skip
from diffray.kernels import attention, norm
from diffray.kernels.attention import QKRotary
from diffray.kernels.rope import rope_tables
from diffray.kernels.rope_scaling import Rope
from diffray.kernels.triton.norm import add_norm, rms_norm
from diffray.kernels.triton.rope import rotate_and_store


# In float16, because the interpreter truncates to bfloat16 where a GPU rounds.
@pytest.mark.parametrize(
    ("rows", "size", "dtype"),
    [(1, 16, "float32"), (5, 96, "float32"), (3, 130, "float32"), (7, 64, "float16")],
)
def test_norms_equal_the_reference(rows: int, size: int, dtype: str) -> None:
    """They round where it rounds."""
    torch.manual_seed(size)
    x, residual = torch.randn(2, rows, size, device=DEVICE).to(getattr(torch, dtype))
    weight = torch.randn(size, device=DEVICE).to(x.dtype)
    torch.testing.assert_close(rms_norm(x, weight, 1e-5), norm.rms_norm(x, weight, 1e-5))
    assert rms_norm(x[:0], weight, 1e-5).shape == (0, size)
    before = residual.clone()
    total, normed = add_norm(x, residual, weight, 1e-5)
    expected = norm.add_norm(x, residual, weight, 1e-5)
    assert torch.equal(total, expected[0]) and torch.equal(residual, before)
    torch.testing.assert_close(normed, expected[1])


@pytest.mark.parametrize("normed", [True, False])
@pytest.mark.parametrize(
    ("queries", "keys", "size", "rotated"),
    [(4, 4, 16, 16), (6, 2, 32, 16), (3, 1, 24, 6), (16, 2, 16, 8)],
)
def test_heads_are_rotated_and_stored_as_in_the_reference(
    normed: bool, queries: int, keys: int, size: int, rotated: int
) -> None:
    torch.manual_seed(queries)
    tokens, slots = 5, 12
    heads = torch.randn(tokens, queries + 2 * keys, size, device=DEVICE)
    weight = torch.randn(queries + keys, size, device=DEVICE) if normed else None
    positions = torch.tensor([3, 4, 9, 0, 1])
    tables = rope_tables(Rope(1e4, 10), rotated, torch.float32)
    cos, sin = (table[positions].unsqueeze(1).to(DEVICE) for table in tables)
    slots_T = torch.tensor([7, 8, 2, 11, 4], device=DEVICE)
    pools = [torch.randn(2, slots, keys, size, device=DEVICE) for _ in range(2)]
    pools[1].copy_(pools[0])
    args = (heads, QKRotary(weight, 1e-5, cos, sin))
    got = rotate_and_store(*args, pools[0][0], pools[0][1], slots_T)
    expected = attention.rotate_and_store(*args, pools[1][0], pools[1][1], slots_T)
    torch.testing.assert_close(got, expected)
    torch.testing.assert_close(pools[0], pools[1])
