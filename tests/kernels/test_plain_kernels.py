"""Linear layers, norms and checksums in torch: each gives what its plain definition gives."""

import subprocess
import sys

import pytest
import torch
from torch.nn import functional

from diffray.kernels.checksum import checksum
from diffray.kernels.linear import linear, pack
from diffray.kernels.norm import rms_norm


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize(
    ("rows", "columns", "outputs"), [(3, 5, 7), (40, 256, 300), (77, 256, 300), (0, 9, 4)]
)
def test_linear_is_linear(dtype: torch.dtype, rows: int, columns: int, outputs: int) -> None:
    torch.manual_seed(0)
    x, weight = torch.randn(rows, columns).to(dtype), torch.randn(outputs, columns).to(dtype)
    expected = functional.linear(x, weight)
    torch.testing.assert_close(linear(x, weight), expected, atol=1e-4, rtol=1e-5)


def test_ever_other_numbers_of_rows_take_no_ever_more_memory() -> None:
    script = """
import resource, torch
from diffray.kernels.linear import linear, pack
torch.set_num_threads(1)
weight = torch.randn(1024, 128)
def peak(counts):
    for rows in counts:
        linear(torch.randn(rows, 128), weight)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
before = peak([64, 500, 512])
print(peak(range(65, 513)) - before)
"""
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert float(run.stdout) < 100  # MB; it would be hundreds


def test_a_packed_matrix_gives_the_same_and_a_row_the_same_among_any_others() -> None:
    torch.manual_seed(0)
    x, weight = torch.randn(512, 256), torch.randn(300, 256)
    packed = pack(weight)
    among_all = linear(x, packed)
    torch.testing.assert_close(among_all, functional.linear(x, weight), atol=1e-4, rtol=1e-5)
    for rows in (0, 1, 3, 7, 32, 40, 77, 256):
        assert torch.equal(linear(x[:rows], packed), among_all[:rows])
    for kept in (weight.double(), weight.bfloat16()):  # torch multiplies these itself
        assert pack(kept) is kept
    views = torch.randn(40, 300)[:, 44:], torch.randn(600, 256)[::2]
    torch.testing.assert_close(linear(*views), functional.linear(*views), atol=1e-4, rtol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_norm_computes_wide_then_casts_then_scales(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x, weight = torch.randn(5, 3, 16).to(dtype), torch.randn(3, 16).to(dtype)
    wide = x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + 1e-5)
    expected = wide.to(dtype) * weight
    torch.testing.assert_close(rms_norm(x, weight, 1e-5), expected)


def test_any_change_of_any_part_shows() -> None:
    ids = torch.arange(600).view(3, 200)
    masked = ids % 7 == 0
    same = checksum(ids, masked)
    assert torch.equal(checksum(ids.clone(), masked.clone()), same)
    others = []
    for place in ((0, 0), (1, 77), (2, 199)):
        for part in (ids, masked):
            changed = part.clone()
            changed[place] = ~changed[place]
            others.append((changed, masked) if part is ids else (ids, changed))
    swapped = ids.clone()
    swapped[0, :2] = ids[0, :2].flip(0)
    others += [(swapped, masked), (ids + 1, masked), (masked.long(), ids)]
    found = [int(checksum(*parts)) for parts in others]
    assert int(same) not in found
    assert len(set(found)) == len(found)
