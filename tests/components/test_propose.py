"""A proposal is the same whether logits were written or only their best was kept, on any ranks."""

import pytest
import torch
from torch import Tensor

from diffray.components.logits import Logits
from diffray.components.mesh import Mesh
from diffray.components.propose import Draws, Rows, choose, propose_plain
from tests.helpers.head_rows import CELLS, MASK, MASK_R1, SIZES, as_one, block, kept_of, logits
from tests.helpers.threads import over_ranks

DRAWS = Draws(torch.tensor([0, 2, 5]), torch.tensor([0.7, 1.5, 3.0]).double(), None, None)


@pytest.mark.parametrize("draws", [None, DRAWS], ids=["best", "drawn"])
@SIZES
def test_what_is_kept_of_logits_is_enough(size: int, draws: Draws | None) -> None:
    asked = Rows(CELLS, draws)

    def kept(mesh: Mesh) -> Tensor:
        parts = kept_of(mesh, logits(), MASK_R1, asked.draw(block()))
        return as_one(propose_plain(parts, asked, block()))

    chosen = choose(Logits(logits(), 0, Mesh()), asked, block(), MASK)
    expected = as_one(chosen.proposal())
    ranks, collectives = over_ranks(size, False, kept)
    assert collectives == (size > 1)
    for found in ranks:
        assert torch.equal(found[0], expected[0])
        torch.testing.assert_close(found, expected)
