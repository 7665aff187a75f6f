"""Tokens and confidences without logits, in Triton, against torch."""

import pytest
import torch
from torch import Tensor

from tests.helpers.triton_device import DEVICE  # isort: skip
from diffray.kernels import confidence as reference
from diffray.kernels import noise
from diffray.kernels.confidence import Confidence, Draw
from diffray.kernels.triton.confidence import CONFIDENCE, confidence, confidence_after_product


def draw_of(rows: int, *temperatures: float) -> Draw:
    """Rows take the temperatures in turn."""
    number = torch.arange(rows, device=DEVICE)
    temperature = torch.tensor(temperatures, device=DEVICE)[number % len(temperatures)]
    return Draw(temperature, number * (1 << 40) + 7, number * 3 + 1, number % 4)


def check(got: Confidence, expected: Confidence) -> None:
    assert torch.equal(got.ids_R, expected.ids_R)
    for ours, theirs in zip(got[1:], expected[1:], strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)


def case(rows: int, hidden: int, vocab: int, gathered: int, start: int = 0) -> list[Tensor]:
    torch.manual_seed(rows + vocab)
    ids = torch.randint(start, start + vocab, (rows, gathered))
    parts = torch.randn(rows, hidden), torch.randn(vocab, hidden) / hidden**0.5, ids
    return [part.to(DEVICE) for part in parts]


TEMPERATURES: list[tuple[float, ...]] = [(), (0.0,), (0.7, 0.0, 1.3), (1e-5, 100.0)]


@pytest.mark.parametrize(
    ("rows", "hidden", "vocab", "gathered", "temperatures"),
    [
        *((1, 16, 100, 1, each) for each in TEMPERATURES),
        *((5, 48, 300, 3, each) for each in TEMPERATURES),
        *((33, 70, 129, 0, each) for each in TEMPERATURES),
        (140, 20, 257, 2, TEMPERATURES[2]),
        *(
            pytest.param(140, 20, 257, 2, each, marks=pytest.mark.long)
            for each in (*TEMPERATURES[:2], TEMPERATURES[3])
        ),
    ],
)
@pytest.mark.rotate(4)
def test_confidence_equals_the_reference(
    rows: int, hidden: int, vocab: int, gathered: int, temperatures: tuple[float, ...]
) -> None:
    x, head, ids = case(rows, hidden, vocab, gathered)
    draw = draw_of(rows, *temperatures) if temperatures else None
    args = (x, head, 0, 3, ids, draw)
    check(confidence(*args), reference.confidence(*args))


# Of 514 rows the logits are stored in two parts.
@pytest.mark.parametrize(
    ("rows", "hidden", "vocab", "gathered", "temperatures"),
    [
        (5, 48, 1100, 3, ()),
        (5, 48, 1100, 3, (0.7, 0.0, 1.3)),
        pytest.param(514, 8, 40, 1, (), marks=pytest.mark.long),
        (0, 8, 40, 1, (0.7,)),
    ],
)
def test_confidence_from_stored_logits_equals_the_reference(
    rows: int, hidden: int, vocab: int, gathered: int, temperatures: tuple[float, ...]
) -> None:
    x, head, ids = case(rows, hidden, vocab, gathered)
    draw = draw_of(rows, *temperatures) if temperatures else None
    args = (x, head, 0, 3, ids, draw)
    check(confidence_after_product(*args), reference.confidence(*args))


@pytest.mark.parametrize(
    ("rows", "dtype", "offered"),
    [(256, "bfloat16", True), (100, "bfloat16", False), (256, "float32", False)],
)
def test_storing_logits_is_offered_for_many_rows(rows: int, dtype: str, offered: bool) -> None:
    x, head, ids = case(rows, 16, 40, 1)
    kind = getattr(torch, dtype)
    names = [v.name for v in CONFIDENCE.variants(x.to(kind), head.to(kind), 0, 3, ids, None)]
    assert ("triton after product" in names) is offered


def test_a_slice_of_the_vocabulary_speaks_of_its_own_ids() -> None:
    x, head, ids = case(6, 32, 200, 4)
    draw = draw_of(6, 0.9, 0.0)
    whole = confidence(x, head, 0, 150, ids, draw)
    parts = [
        confidence(x, part, start, 150, ids, draw)
        for start, part in ((0, head[:90]), (90, head[90:]))
    ]
    check(parts[1], reference.confidence(x, head[90:], 90, 150, ids, draw))
    torch.testing.assert_close(parts[0].gathered_RK + parts[1].gathered_RK, whole.gathered_RK)
    second = parts[1].scores_R > parts[0].scores_R
    assert torch.equal(torch.where(second, parts[1].ids_R, parts[0].ids_R), whole.ids_R)
    lse = torch.logaddexp(parts[0].logsumexp_R, parts[1].logsumexp_R)
    torch.testing.assert_close(lse, whole.logsumexp_R)


def of_logits(logits_RV: Tensor, forbidden: int, draw: Draw | None = None) -> Confidence:
    """Let these logits come out of the product with the head."""
    rows = len(logits_RV)
    none = torch.empty(rows, 0, dtype=torch.long, device=DEVICE)
    return confidence(torch.eye(rows, device=DEVICE), logits_RV.T, 0, forbidden, none, draw)


def test_of_equals_the_lowest_id_is_chosen_and_the_forbidden_one_never() -> None:
    logits = torch.zeros(2, 9000, device=DEVICE)
    logits[1, [4, 4500, 8999]] = 2.0
    got = of_logits(logits, 4)
    assert got.ids_R.tolist() == [0, 4500]
    torch.testing.assert_close(got.logsumexp_R, logits.logsumexp(1))


def test_rows_in_which_all_but_one_id_is_out_of_the_question() -> None:
    logits = torch.full((1, 9000), -torch.inf, device=DEVICE)
    logits[0, 8000] = -5.0
    got = of_logits(logits, 8999)
    assert got.ids_R.tolist() == [8000]
    assert got.logits_R.tolist() == [-5.0] == got.logsumexp_R.tolist()


def test_noise_is_that_of_the_rest_of_the_house() -> None:
    draw = draw_of(5, 1.0)
    flat = torch.zeros(5, 3000, device=DEVICE)
    ids = torch.arange(3000, device=DEVICE)
    drawn = noise.gumbel(draw.seed_R, draw.position_R, draw.step_R, ids.unsqueeze(0)).float()
    got = of_logits(flat, -1, draw)
    assert torch.equal(got.ids_R, drawn.argmax(1))
    torch.testing.assert_close(got.scores_R, drawn.amax(1), atol=0, rtol=1e-6)


def test_no_rows_give_no_answers() -> None:
    x, head, ids = case(2, 16, 40, 1)
    got = confidence(x[:0], head, 0, 3, ids[:0], None)
    assert [len(part) for part in got] == [0] * 6
