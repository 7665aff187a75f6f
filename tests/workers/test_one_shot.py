"""Sums in one shot are used where all ranks can open them and they equal the group's.

Without GPUs stand-ins are opened (tests/helpers/stand_in_sums.py), over gloo.
"""

from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from diffray.components.mesh import Mesh, OneShot, open_one_shot
from tests.helpers.paths import GOLDEN
from tests.helpers.rank_sums import alone, generated, opened
from tests.helpers.ranks import on_ranks

MODEL = str(GOLDEN / "llada_moe")
BEGINS = "all-reduce: checking one-shot sums; --no-bring-up skips this"
OFF = "all-reduce: one-shot sums are off: "
OTHER = f"{OFF}another rank refuses them"
ABSENT = f"{OFF}RuntimeError: no symmetric memory between these devices"
SAID = {  # by rank 0 and by rank 1
    "right": ([], []),
    "wrong_on_rank_1": ([f"{OFF}the ranks' sums differ"], [f"{OFF}the ranks' sums differ"]),
    "twice": ([f"{OFF}100% of the rows are wrong"], [f"{OFF}100% of the rows are wrong"]),
    "absent_on_rank_1": ([OTHER], [ABSENT]),
    "fails_on_rank_1": (
        [f"{OFF}the ranks' sums differ"],
        [f"{OFF}RuntimeError: not implemented for 'Half'"],
    ),
}


@pytest.mark.slow
def test_what_is_wrong_or_absent_on_one_rank_is_used_on_none() -> None:
    ranks = on_ranks(2, partial(opened, names=[*SAID]))
    for rank, found in enumerate(ranks):
        begins = [BEGINS] * (rank == 0)
        assert found == [(name == "right", begins + said[rank]) for name, said in SAID.items()]


def test_torchs_one_shot_sum_is_called_as_it_is_declared(monkeypatch: pytest.MonkeyPatch) -> None:
    """On meta tensors: its arguments are checked, and nothing runs."""
    from torch.distributed import _symmetric_memory as symm_mem

    empty = Mock(wraps=torch.empty)
    monkeypatch.setattr(symm_mem, "empty", empty)
    monkeypatch.setattr(symm_mem, "rendezvous", lambda buffer, group: (buffer, group))
    group: Any = SimpleNamespace(group_name="ranks")
    meta = torch.device("meta")
    add_up = open_one_shot(Mesh(0, 2, group=group, device=meta), torch.bfloat16, 1 << 20)
    empty.assert_called_once_with(1 << 19, dtype=torch.bfloat16, device=meta)
    x = torch.empty(64, 2048, dtype=torch.bfloat16, device="meta")
    out = add_up(x)
    assert out.shape == x.shape and out.dtype == x.dtype and out is not x


@pytest.mark.slow
def test_tokens_and_the_order_of_sums_are_those_of_all_ranks() -> None:
    expected, most = alone(MODEL), 1 << 13
    ranks = on_ranks(2, partial(generated, model=MODEL, most_bytes=most))
    assert [rank.tokens for rank in ranks] == [expected, expected]
    assert ranks[0].one_shot == ranks[1].one_shot and ranks[0].group == ranks[1].group
    sizes = [8 * torch.Size(shape).numel() for shape in ranks[0].one_shot]
    assert 0 < max(sizes) <= most < 8 * torch.Size(ranks[0].group[0]).numel()


def test_only_what_fits_is_summed_in_one_shot() -> None:
    one_shot = OneShot(lambda x: x, torch.bfloat16, 1024)
    x = torch.zeros(8, 64, dtype=torch.bfloat16)
    assert one_shot.fits(x) and one_shot.fits(x[4:])
    for other in (
        x.float(),
        torch.zeros(8, 65, dtype=torch.bfloat16),  # too large
        x.view(-1)[:12],  # no multiple of what a thread reads
        x.view(-1)[4:12],  # nor does this begin at one
        x.T,
    ):
        assert not one_shot.fits(other)
