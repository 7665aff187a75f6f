"""The end of a step in Triton, against torch."""

import pytest
import torch

from tests.helpers.triton_device import on_device  # isort: skip
from diffray.kernels import acceptance as reference
from diffray.kernels.acceptance import Progress, Rules, Settling
from diffray.kernels.confidence import Confidence
from diffray.kernels.rules import SHARE
from diffray.kernels.triton.acceptance import SETTLE, settle


def case(
    rows: int, length: int, dtype: torch.dtype, *, coarse: bool = False
) -> tuple[Confidence, Settling]:
    """Return rows of random rules, blocks and confidences; coarse ones are often equal."""
    torch.manual_seed(rows * 1000 + length)
    trash, cells = rows * length + 5, torch.randperm(rows * length + 5)[: rows * length]
    length_B = torch.randint(1, length + 1, (rows,))
    inside_BL = torch.arange(length) < length_B.unsqueeze(1)
    masked_BL = (torch.rand(rows, length) < 0.6) & inside_BL
    masked_BL[0] = False  # a row that is done
    open_BL = masked_BL & (torch.rand(rows, length) < 0.8)
    heads_BL = torch.full((rows, length), -1)
    heads_BL[masked_BL] = torch.randperm(int(masked_BL.sum()))
    heads_BL[-1, ::3] = -1  # nothing was proposed there
    count = int(masked_BL.sum())
    logits_R = -torch.rand(count, dtype=dtype) * 2
    logits_R = (logits_R * 4).round() / 4 if coarse else logits_R
    mask_R = logits_R + torch.randn(count, dtype=dtype) - 1
    zeros_R = torch.zeros(count, dtype=dtype)
    gathered_RK = torch.stack([mask_R, zeros_R], dim=1)
    ids_R = torch.randint(0, 500, (count,))
    found = Confidence(ids_R, logits_R, logits_R, logits_R, zeros_R, gathered_RK)
    steps_B = torch.randint(0, 4, (rows,))
    rules = Rules(
        torch.arange(rows) % 3, torch.rand(rows, dtype=torch.float64), torch.randint(1, 9, (rows,))
    )
    progress = Progress(
        torch.randint(0, 500, (rows, length)),
        masked_BL,
        torch.randint(0, 9, (rows, length)),
        torch.rand(rows, length),
        steps_B,
        ~masked_BL.any(-1),
        torch.randint(0, 90, (rows,)),
        length_B,
        cells.view(rows, length).where(inside_BL, trash),
    )
    canvases = torch.zeros(trash + 1, dtype=torch.long), torch.zeros(trash + 1, dtype=torch.bool)
    return found, Settling(heads_BL, open_BL, rules, progress, *canvases)


@pytest.mark.parametrize("coarse", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("rows", "length"), [(1, 32), (3, 1), (7, 33), (13, 64)])
def test_settle_equals_the_reference(
    rows: int, length: int, dtype: torch.dtype, coarse: bool
) -> None:
    found, place = case(rows, length, dtype, coarse=coarse)
    results = []
    for run in (settle, reference.settle):
        args = on_device(found), *on_device(place)
        run(*args)
        results.append([part.cpu() for part in SETTLE.written(*args)])
    changed = 0
    for ours, theirs, before in zip(*results, SETTLE.written(found, *place), strict=True):
        if ours.numel() == place.ids_N.numel():  # but for what padding writes to
            ours, theirs = ours[:-1], theirs[:-1]
        torch.testing.assert_close(ours, theirs, atol=1e-6, rtol=1e-6)
        changed += not torch.equal(theirs, before[: len(theirs)])
    assert rows == 1 or changed >= 5


def test_a_row_with_nothing_sure_gets_its_best_and_only_that() -> None:
    found, place = case(6, 16, torch.float32)
    low_R = -20 - torch.rand(len(found.ids_R))
    mask_R1 = torch.full((len(low_R), 1), -99.0)
    found = found._replace(logits_R=low_R, best_R=low_R, gathered_RK=mask_R1)
    wanted = torch.full((6,), 2.0, dtype=torch.float64)
    rules = Rules(torch.full((6,), SHARE), wanted, torch.full((6,), 99))
    steps_B = torch.full((6,), 99)  # all odd positions have been taken
    progress = place.progress._replace(steps_B=steps_B, masked_BL=place.open_BL.clone())
    for run in (settle, reference.settle):
        args = on_device(found), *on_device(place._replace(rules=rules, progress=progress))
        run(*args)
        taken_BL = place.open_BL & ~args[4].masked_BL.cpu()
        assert torch.equal(taken_BL.sum(-1), place.open_BL.any(-1).long())
        for row, at in taken_BL.nonzero().tolist():
            heads = place.heads_BL[row][place.open_BL[row]]
            known = [float(low_R[head]) for head in heads if head >= 0]
            assert not known or float(low_R[place.heads_BL[row, at]]) == max(known)
