"""What takes all ranks is used where all found it right and faster: one-shot sums, recorded steps.

Without GPUs stand-ins are tried (tests/helpers/stand_in_sums.py, stand_in_recorders.py), in real
processes over gloo.
"""

from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from diffray.components.mesh import Mesh, OneShot, open_one_shot
from diffray.workers.bring_up.findings import Findings, GraphsOutcome, SumsOutcome
from diffray.workers.engine_options import EngineOptions
from tests.helpers.paths import GOLDEN
from tests.helpers.rank_sums import alone, generated, kept, recorded, tried
from tests.helpers.ranks import on_ranks
from tests.helpers.stand_in_sums import GROUP_S, MOST, ONE_SHOT_S

MODEL = str(GOLDEN / "llada_moe")
SLOW = "16000 us, but the group's takes 5000"
REASONS = {  # of rank 0 and of rank 1
    "unequal": ("8192 bytes: the ranks' sums differ", "8192 bytes: the ranks' sums differ"),
    "absent_on_rank_1": (
        "another rank cannot",
        "RuntimeError: no symmetric memory between these devices",
    ),
    "slow_on_rank_1": (f"8192 bytes: {SLOW}", f"8192 bytes: {SLOW}"),
    "crash_on_rank_1": ("it ended (1): ", "it crashed (SIGABRT)"),
}
OTHER = "another rank refuses them; its log says why"
REFUSED = (  # as what recordings are that are wrong, slow or refused on rank 1
    [OTHER, OTHER, OTHER],
    [
        "100% of the rows of 1 x 32 positions differ between replays and launched steps",
        "replays take longer than launched steps",
        "a step could not be recorded: RuntimeError: operation not permitted when stream is "
        "capturing",
    ],
)


@pytest.mark.long
def test_what_is_wrong_slow_or_broken_on_one_rank_is_used_on_none() -> None:
    ranks = on_ranks(2, partial(tried, names=[*REASONS], patience_s=120))
    for number, (name, reasons) in enumerate(REASONS.items()):
        for found, reason in zip((rank[number] for rank in ranks), reasons, strict=True):
            assert found.most_bytes == 0, name
            assert found.refused.startswith(reason), name


@pytest.mark.long
def test_sums_that_hang_are_given_up() -> None:
    for (found,) in on_ranks(2, partial(tried, names=["hang_on_rank_1"], patience_s=20)):
        assert found == SumsOutcome(refused="it did not end within 20 s")


@pytest.mark.long
def test_what_is_right_and_faster_is_used_up_to_the_size_to_which_it_is() -> None:
    ranks = on_ranks(2, partial(tried, names=["right", "right_if_small"], patience_s=120))
    for right, small in ranks:
        assert right.most_bytes == 1 << 21 and right.dtype == "float32" and right.refused == ""
        assert right.one_shot_s == pytest.approx(ONE_SHOT_S)
        assert right.group_s == pytest.approx(GROUP_S)
        assert small.most_bytes == MOST and small.refused == ""


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


@pytest.mark.long
@pytest.mark.parametrize("is_kept", [True, False], ids=["kept", "not kept"])
def test_rank_0_keeps_what_was_found_and_every_rank_says_why_not(
    is_kept: bool, tmp_path: Path
) -> None:
    """What rank 0's own trials did not leave on disk, as for want of memory, stays away."""
    ranks = on_ranks(2, partial(kept, cache=tmp_path, name="refused_on_rank_1", is_kept=is_kept))
    first, second = ranks
    assert first.kept == second.kept == (first.found if is_kept else None)
    assert first.found.graphs is not None and first.found.sums is not None
    assert first.said == [
        "all-reduce: one-shot sums are off: another rank cannot", f"cuda_graphs: off: {OTHER}"
    ]  # fmt: skip
    own = "a step could not be recorded: RuntimeError: operation not permitted when stream is"
    assert second.said[0] == (
        "all-reduce: one-shot sums are off: RuntimeError: no symmetric memory between these devices"
    )
    assert second.said[1].startswith(f"cuda_graphs: off: {own}") and len(second.said) == 2


@pytest.mark.long
def test_steps_are_recorded_over_ranks_only_where_all_found_replays_right() -> None:
    names = ["right", "wrong_on_rank_1", "slow_on_rank_1", "refused_on_rank_1"]
    ranks = on_ranks(2, partial(recorded, names=names, patience_s=120))
    for (right, *bad), own in zip(ranks, REFUSED, strict=True):
        assert right.graphs is not None and right.graphs.refused == ""
        assert right.graphs.replayed_s is not None and right.graphs.launched_s is not None
        assert right.graphs.replayed_s < right.graphs.launched_s
        assert [found.graphs and found.graphs.refused for found in bad] == own


@pytest.mark.long
def test_recordings_that_hang_or_crash_on_a_rank_are_given_up_and_sums_are_kept() -> None:
    names, late = ["hang_on_rank_1", "crash_on_rank_1"], "it did not end within 45 s"
    ranks = on_ranks(2, partial(recorded, names=names, patience_s=45))
    for rank, crashed in zip(ranks, (late, "it crashed (SIGABRT)"), strict=True):
        assert [found.graphs for found in rank] == [GraphsOutcome(late), GraphsOutcome(crashed)]
        assert all(found.sums.refused not in (late, crashed) for found in rank)


TOGETHER = Findings(
    key={"gpu": "Test"}, graphs=GraphsOutcome("", 2.0, 1.0), sums=SumsOutcome(most_bytes=8192)
)


@pytest.mark.parametrize(
    ("found", "ranks", "unasked"),
    [
        (TOGETHER, 2, None),  # as by default: on
        (TOGETHER.model_copy(update={"sums": None}), 1, None),
        (TOGETHER.model_copy(update={"sums": None}), 2, False),  # one rank alone has tried them
        (TOGETHER.model_copy(update={"graphs": None}), 2, False),
        (TOGETHER.model_copy(update={"graphs": GraphsOutcome("they differ")}), 2, False),
        (Findings(), 2, False),
        (Findings(), 1, None),
    ],
)
def test_auto_records_over_ranks_exactly_if_all_have_tried_it(
    found: Findings, ranks: int, unasked: bool | None
) -> None:
    assert found.applied_to(EngineOptions(), ranks).cuda_graphs is unasked
    if found.graphs is None or not found.graphs.refused:  # asked for, they are recorded
        assert found.applied_to(EngineOptions(cuda_graphs=True), ranks).cuda_graphs is True


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
    assert first.said == ["all-reduce: one-shot sums are no longer used: another rank cannot"]
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
