"""Credit in Triton, against torch, step after step: ids come on top, gain, and overtake others."""

import pytest
import torch
from torch import Tensor

from tests.helpers.triton_device import on_device  # isort: skip
from diffray.kernels import credit as reference
from diffray.kernels.confidence import Confidence, confidence_of_logits
from diffray.kernels.credit import Credits, Gains, Memory
from diffray.kernels.triton.credit import reward

VOCAB, MASK = 17, 9
STEPS = 4


def blank_credits(rows: int, length: int, remembered: int) -> Credits:
    """Rows that give credit in ways of their own; the second gives none."""
    shape = rows, length, remembered
    memory = Memory(torch.full(shape, -1), torch.zeros(shape, dtype=torch.float64))
    alpha_B = 4 + torch.arange(rows, dtype=torch.float64)
    decay_B = 0.5 + 0.4 * torch.rand(rows, dtype=torch.float64)
    decay_B[1:2] = -1
    return Credits(memory, Gains(alpha_B, alpha_B / 16, decay_B))


def found_at(step: int, known_RK: Tensor, dtype: torch.dtype, *, parts: bool) -> Confidence:
    """Return what the head finds; its logits are coarse, so that many are equal."""
    torch.manual_seed(step % 3)
    logits_RV = (torch.randn(len(known_RK), VOCAB) * 2).round().to(dtype) / 2
    logits_RV[0] = logits_RV[0, 0]  # all are equal, the mask too
    logits_RV[3::4, MASK] += 4
    gather_RK = torch.cat([torch.full((len(known_RK), 1), MASK), known_RK], dim=1)
    found = confidence_of_logits(logits_RV, 0, MASK, gather_RK, None)
    if parts:  # as ranks join theirs
        found = found._replace(gathered_RK=found.gathered_RK.T.contiguous().T)
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(
    ("rows", "length", "remembered"), [(1, 12, 12), (3, 5, 4), (2, 7, 70)], ids=str
)
@pytest.mark.rotate(2)
def test_reward_equals_the_reference(
    rows: int, length: int, remembered: int, dtype: torch.dtype
) -> None:
    """Of some positions of blocks, some decided; of rows without credit nothing changes."""
    torch.manual_seed(rows)
    cells_R = torch.randperm(rows * length)[: rows * length - 3]
    masked_BL = torch.rand(rows, length) < 0.8
    masked_BL[0] = True
    theirs = blank_credits(rows, length, remembered)
    ours = on_device(theirs)
    changed = overtaken = 0
    for step in range(STEPS):
        found = found_at(step, theirs.known(cells_R), dtype, parts=step == 1)
        about = cells_R, masked_BL
        got = reward(on_device(found), ours, *map(on_device, about), MASK)  # type: ignore[call-arg, arg-type]
        expected = reference.reward(found, theirs, *about, MASK)
        assert torch.equal(got.ids_R.cpu(), expected.ids_R)
        torch.testing.assert_close(tuple(part.cpu() for part in got), tuple(expected))
        kept = [part.cpu() for part in ours.memory]
        torch.testing.assert_close(kept, [*theirs.memory])
        plain_R = cells_R // length == 1
        for part, before in zip(got, found, strict=True):
            same = part.cpu()[plain_R], before[plain_R, :1] if before.dim() > 1 else before[plain_R]
            assert torch.equal(*same)
        changed += not torch.equal(got.logsumexp_R.cpu(), found.logsumexp_R)
        overtaken += int((got.ids_R.cpu() != found.ids_R).sum())
        masked_BL[:, step] = False
    nobody = Confidence(*(part[:0] for part in found))
    got = reward(on_device(nobody), ours, *map(on_device, (cells_R[:0], masked_BL)), MASK)  # type: ignore[call-arg, arg-type]
    assert len(got.ids_R) == 0
    torch.testing.assert_close([part.cpu() for part in ours.memory], [*theirs.memory])
    assert changed == STEPS and overtaken > 0
    assert (theirs.memory.ids_BLK == MASK).any()  # it was on top, too
