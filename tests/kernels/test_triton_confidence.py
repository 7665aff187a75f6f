"""Tokens and confidences without logits, in Triton, against torch."""

from itertools import product
from unittest.mock import Mock

import pytest
import torch

from tests.helpers.triton_device import DEVICE  # isort: skip
from diffray.kernels import confidence as reference
from diffray.kernels.confidence import Draw
from diffray.kernels.kernel import Run
from diffray.kernels.triton import confidence as programs
from diffray.kernels.triton.confidence import CONFIDENCE, confidence, confidence_after_product
from diffray.kernels.verify import verified

Size = tuple[int, int, int, int]  # rows, hidden, vocabulary, gathered ids of each row


def draw_of(rows: int, *temperatures: float) -> Draw | None:
    """Rows take the temperatures in turn."""
    if not temperatures:
        return None
    number = torch.arange(rows, device=DEVICE)
    temperature = torch.tensor(temperatures, device=DEVICE)[number % len(temperatures)]
    return Draw(temperature, number * (1 << 40) + 7, number * 3 + 1, number % 4)


def check(run: Run, size: Size, draw: Draw | None, start: int = 0) -> None:
    """Compare with the reference; some ids of the gathered ones may be another rank's."""
    rows, hidden, vocab, gathered = size
    torch.manual_seed(rows + vocab)
    ids = torch.randint(vocab, (rows, gathered))
    parts = torch.randn(rows, hidden), torch.randn(vocab, hidden) / hidden**0.5, ids
    x, head, ids = (part.to(DEVICE) for part in parts)
    args = x, head[start:], start, start + 3, ids, draw
    got, expected = run(*args), reference.confidence(*args)
    assert torch.equal(got.ids_R, expected.ids_R)
    for ours, theirs in zip(got[1:], expected[1:], strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)


SIZES: list[Size] = [(1, 16, 100, 1), (5, 48, 300, 3), (33, 70, 129, 0), (0, 16, 40, 1)]
MANY_ROWS = 140, 20, 257, 2
TEMPERATURES: list[tuple[float, ...]] = [(), (0.0,), (0.7, 0.0, 1.3), (1e-5, 100.0)]
LONG = pytest.mark.long


@pytest.mark.parametrize(
    ("size", "temperatures"),
    [
        *product(SIZES, TEMPERATURES),
        (MANY_ROWS, TEMPERATURES[2]),
        *(pytest.param(MANY_ROWS, TEMPERATURES[n], marks=LONG) for n in (0, 1, 3)),
    ],
)
@pytest.mark.rotate(4)
def test_confidence_equals_the_reference(size: Size, temperatures: tuple[float, ...]) -> None:
    check(confidence, size, draw_of(size[0], *temperatures))


# The logits of 514 rows are stored in two parts.
@pytest.mark.parametrize(
    "size", [(5, 48, 1100, 3), pytest.param((514, 8, 40, 1), marks=LONG), (0, 8, 40, 1)]
)
def test_confidence_from_stored_logits_equals_the_reference(size: Size) -> None:
    check(lambda *args: confidence_after_product(*args[:-1]), size, None)


@pytest.mark.parametrize(
    ("rows", "dtype", "drawn", "stored"),
    [
        (129, torch.float16, False, True),
        (128, torch.float16, False, False),
        (129, torch.float16, True, False),
        (129, torch.float32, False, False),
    ],
)
def test_logits_of_many_rows_in_16_bits_are_stored_unless_they_draw(
    rows: int, dtype: torch.dtype, drawn: bool, stored: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    product = Mock(wraps=confidence_after_product)
    monkeypatch.setattr(programs, "confidence_after_product", product)
    torch.manual_seed(rows)
    x, head = torch.randn(rows, 16).to(DEVICE, dtype), torch.randn(40, 16).to(DEVICE, dtype)
    asked, draw = torch.full((rows, 1), 39, device=DEVICE), draw_of(rows, *[0.7] * drawn)
    assert verified(CONFIDENCE, (x, head, 0, 39, asked, draw), {})[1] == ""
    assert product.called == stored


def test_a_slice_of_the_vocabulary_speaks_of_its_own_ids() -> None:
    check(confidence, (6, 32, 200, 4), draw_of(6, 0.9, 0.0), start=90)


def test_of_equals_the_lowest_id_is_chosen_and_the_forbidden_one_never() -> None:
    """And the only one that is possible, wherever it stands."""
    logits_RV = torch.zeros(3, 9000, device=DEVICE)
    logits_RV[1, [4, 4500, 8999]] = 2.0
    logits_RV[2] = -torch.inf
    logits_RV[2, 8000] = -5.0
    none = torch.empty(3, 0, dtype=torch.long, device=DEVICE)
    # These logits come out of the product with the head.
    got = confidence(torch.eye(3, device=DEVICE), logits_RV.T.nan_to_num(), 0, 4, none, None)
    assert got.ids_R.tolist() == [0, 4500, 8000]
    assert float(got.logits_R[2]) == -5.0
    torch.testing.assert_close(got.logsumexp_R, logits_RV.logsumexp(1))
