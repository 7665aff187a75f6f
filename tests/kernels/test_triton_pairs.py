"""The lists of each expert's pairs in Triton, against a sort."""

import pytest
import torch

from tests.helpers.triton_device import DEVICE  # isort: skip
from diffray.kernels.triton.pairs import list_pairs


# Of 5,000 pairs a program looks at a part at a time.
@pytest.mark.parametrize(("tokens", "chosen"), [(1, 1), (40, 8), (2500, 2)])
def test_each_expert_s_pairs_are_listed_in_their_order(tokens: int, chosen: int) -> None:
    torch.manual_seed(tokens)
    ids = torch.randint(-1, 7, (tokens, chosen), device=DEVICE)
    starts, order = list_pairs(ids, 6)
    flat = ids.flatten()
    expected = [(flat == expert).nonzero().flatten() for expert in range(6)]
    assert starts.tolist() == [0, *torch.tensor([len(x) for x in expected]).cumsum(0).tolist()]
    assert torch.equal(order[: int(starts[-1])].long(), torch.cat(expected))
