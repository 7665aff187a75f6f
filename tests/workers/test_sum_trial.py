"""One-shot sums over ranks are used where all ranks found them right and faster, and nowhere else.

Without GPUs stand-ins are tried (tests/helpers/stand_in_sums.py), in real processes over gloo.
"""

from functools import partial
from pathlib import Path

import pytest
import torch

from diffray.components.mesh import OneShot
from diffray.workers.bring_up.findings import SumsOutcome
from tests.helpers.paths import GOLDEN
from tests.helpers.rank_sums import alone, generated, kept, tried, tried_with_torch
from tests.helpers.ranks import on_ranks
from tests.helpers.stand_in_sums import MOST

MODEL = str(GOLDEN / "llada_moe")
REASONS = {  # of rank 0 and of rank 1; None: the other's, which its log has
    "wrong_on_rank_1": ("8192 bytes: the ranks' sums differ", "8192 bytes: the ranks' sums differ"),
    "unequal": ("8192 bytes: the ranks' sums differ", "8192 bytes: the ranks' sums differ"),
    "absent_on_rank_1": (
        "another rank cannot",
        "RuntimeError: no symmetric memory between these devices",
    ),
    "slow_on_rank_1": ("8192 bytes: ", "8192 bytes: "),
    "crash_on_rank_1": ("it ended (1): ", "it crashed (SIGABRT)"),
}


@pytest.mark.long
def test_what_is_wrong_slow_or_broken_on_one_rank_is_used_on_none() -> None:
    ranks = on_ranks(2, partial(tried, names=[*REASONS], patience_s=60))
    for number, (name, reasons) in enumerate(REASONS.items()):
        for found, reason in zip((rank[number] for rank in ranks), reasons, strict=True):
            assert found.most_bytes == 0, name
            assert found.refused.startswith(reason), name
    assert " us, and the group's " in ranks[0][list(REASONS).index("slow_on_rank_1")].refused


@pytest.mark.long
def test_sums_that_hang_are_given_up() -> None:
    for (found,) in on_ranks(2, partial(tried, names=["hang_on_rank_1"], patience_s=20)):
        assert found == SumsOutcome(refused="it did not end within 20 s")


@pytest.mark.long
def test_what_is_right_and_faster_is_used_up_to_the_size_to_which_it_is() -> None:
    ranks = on_ranks(2, partial(tried, names=["right", "right_if_small"], patience_s=120))
    for right, small in ranks:
        assert right.most_bytes >= MOST and right.dtype == "float32" and right.refused == ""
        assert right.one_shot_s is not None and right.group_s is not None
        assert right.one_shot_s < right.group_s
        assert 8192 <= small.most_bytes <= MOST
    assert ranks[0][0].most_bytes == ranks[1][0].most_bytes
    assert ranks[0][1].most_bytes == ranks[1][1].most_bytes


@pytest.mark.long
def test_without_symmetric_memory_the_groups_sums_are_used() -> None:
    for found in on_ranks(2, tried_with_torch):
        assert found.most_bytes == 0 and found.refused


@pytest.mark.long
def test_rank_0_keeps_what_was_found_and_every_rank_says_why_not(tmp_path: Path) -> None:
    first, second = on_ranks(2, partial(kept, cache=tmp_path, name="absent_on_rank_1"))
    assert first.kept == second.kept == first.found
    assert first.said == ["all-reduce: the group's alone: another rank cannot"]
    assert second.said == [
        "all-reduce: the group's alone: RuntimeError: no symmetric memory between these devices"
    ]


@pytest.mark.long
def test_tokens_and_the_order_of_sums_are_those_of_all_ranks() -> None:
    expected, most = alone(MODEL), 1 << 13
    ranks = on_ranks(2, partial(generated, model=MODEL, most_bytes=most, opener=""))
    assert [rank.tokens for rank in ranks] == [expected, expected]
    assert ranks[0].one_shot == ranks[1].one_shot and ranks[0].group == ranks[1].group
    sizes = [8 * torch.Size(shape).numel() for shape in ranks[0].one_shot]
    assert 0 < max(sizes) <= most < 8 * torch.Size(ranks[0].group[0]).numel()


@pytest.mark.long
def test_if_a_rank_can_no_longer_none_does() -> None:
    """What was found at an earlier start may not hold for this one."""
    opener = "tests.helpers.stand_in_sums:absent_on_rank_1"
    first, second = on_ranks(2, partial(generated, model=MODEL, most_bytes=1 << 13, opener=opener))
    assert first.tokens == second.tokens and not first.one_shot and first.group == second.group
    assert first.said == ["all-reduce: in one shot no longer: another rank cannot"]
    assert "no symmetric memory" in second.said[0]


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
