"""A proposal is the same whether logits were written or only their best was kept, on any ranks."""

import pytest
import torch
from torch import Tensor

from diffray.components.block import Block, Proposal
from diffray.components.logits import Logits
from diffray.components.mesh import Mesh
from diffray.components.propose import Draws, Rows, joined, propose, propose_plain
from diffray.components.transforms import KeptIds, LogitBias
from diffray.kernels.confidence import Confidence, Draw, confidence_of_logits
from diffray.kernels.credit import Credits, Gains, Memory, reward
from tests.helpers.decoding import block_of
from tests.helpers.threads import on_ranks, over_ranks

VOCAB, MASK = 24, 5
ROWS, LENGTH = 3, 4
CELLS = torch.tensor([0, 2, 3, 4, 5, 9, 10])
MASK_R1 = torch.full((len(CELLS), 1), MASK)
SIZES = pytest.mark.parametrize("size", [1, 2, 3])


def logits() -> Tensor:
    draw = torch.Generator().manual_seed(8)
    values = torch.randn(len(CELLS), VOCAB, generator=draw, dtype=torch.float64) * 2
    values[1, MASK] = 9.0  # the model would rather keep the mask
    values[2, [3, 11, 20]] = 7.0  # equals, each on another rank
    values[3, MASK] = values[3].max()  # as sure of the mask as of its best
    return values


def block() -> Block:
    number = torch.arange(ROWS)
    positions_BL = torch.arange(7, 7 + ROWS * LENGTH).view(ROWS, LENGTH)
    masked_BL = torch.ones(ROWS, LENGTH, dtype=torch.bool)
    return block_of(masked_BL, positions_BL=positions_BL, seed_B=number * 13 + 1, step_B=number)


def rows(draws: Draws | None) -> Rows:
    return Rows(CELLS, draws, None, (), None, (), 0)


def shard_of(mesh: Mesh, values_RV: Tensor) -> Logits:
    start, stop = mesh.shard(VOCAB, "vocabulary")
    return Logits(values_RV[:, start:stop], start, mesh)


def kept_of(mesh: Mesh, values_RV: Tensor, gather_RK: Tensor, draw: Draw | None) -> Confidence:
    """Return what is kept of logits, joined over the ranks."""
    part = shard_of(mesh, values_RV)
    found = confidence_of_logits(part.values_RV, part.start, MASK, gather_RK, draw)
    return joined(found, mesh)


DRAWS = Draws(torch.tensor([0, 2, 5]), torch.tensor([0.7, 1.5, 3.0]).double(), None, None)


@pytest.mark.parametrize("draws", [None, DRAWS], ids=["best", "drawn"])
@SIZES
def test_what_is_kept_of_logits_is_enough(size: int, draws: Draws | None) -> None:
    asked = rows(draws)

    def kept(mesh: Mesh) -> Tensor:
        parts = kept_of(mesh, logits(), MASK_R1, asked.draw(block()))
        return as_one(propose_plain(parts, asked, block()))

    expected = as_one(propose(Logits(logits(), 0, Mesh()), asked, block(), None, MASK))
    assert asked.plain
    ranks, collectives = over_ranks(size, False, kept)
    assert collectives == (size > 1)
    for found in ranks:
        assert torch.equal(found[0], expected[0])
        torch.testing.assert_close(found, expected)


def blank_credits() -> Credits:
    """Two rows that give credit, each in its own way, and one that does not."""
    shape = ROWS, LENGTH, LENGTH
    memory = Memory(torch.full(shape, -1), torch.zeros(shape, dtype=torch.float64))
    gains = [10.0, 7.0, 0.0], [0.2, 0.5, 0.0], [0.8, 0.9, -1.0]
    return Credits(memory, Gains(*torch.tensor(gains).double()))


def changing(step: int) -> Tensor:
    """Logits whose favourites change, so that ids with credit come back and overtake."""
    draw = torch.Generator().manual_seed(step % 3)
    return logits() + 3 * torch.randn(len(CELLS), VOCAB, generator=draw, dtype=torch.float64)


@SIZES
def test_credit_needs_only_the_logits_of_what_it_remembers(size: int) -> None:
    """The mask on top, its credit, equals, and ids that gain what others had."""
    asked, steps = rows(None), range(LENGTH)

    def kept(mesh: Mesh) -> list[Tensor]:
        own, found = blank_credits(), []
        for step in steps:
            gather_RK = torch.cat([MASK_R1, own.known(CELLS)], dim=1)
            parts = kept_of(mesh, changing(step), gather_RK, None)
            after = reward(parts, own, CELLS, block().masked_BL, MASK)
            found.append(as_one(propose_plain(after, asked, block())))
        return [*found, *own.memory]

    own = blank_credits()
    expected = [
        as_one(propose(Logits(changing(step), 0, Mesh()), asked, block(), own, MASK))
        for step in steps
    ]
    without = as_one(propose(Logits(changing(3), 0, Mesh()), asked, block(), None, MASK))
    assert not torch.equal(expected[-1][0], without[0])  # credit has changed some request's token
    for found in on_ranks(size, kept):
        for ours, theirs in zip(found, [*expected, *own.memory], strict=True):
            torch.testing.assert_close(ours, theirs)


def as_one(proposal: Proposal) -> Tensor:
    return torch.stack(
        [proposal.ids_BL.double(), proposal.confidence_BL.double(), proposal.logprob_BL.double()]
    )


def test_filters_and_row_transforms_need_the_logits() -> None:
    some = torch.tensor([1])
    assert not rows(DRAWS._replace(top_k_Q=some)).plain
    assert not rows(DRAWS._replace(top_p_Q=some.double())).plain
    assert not Rows(CELLS, None, None, (KeptIds(((slice(0, 1), some),)),), None, (), 0).plain
    assert not Rows(CELLS, None, None, (), None, (slice(0, 1),), 2).plain
    assert not doubting(some).plain


def doubting(ids: Tensor) -> Rows:
    rows_E = torch.arange(len(CELLS)).repeat_interleave(len(ids))
    minus = torch.full((len(rows_E),), -torch.inf)
    return Rows(CELLS, None, None, (), LogitBias(rows_E, ids.repeat(len(CELLS)), minus), (), 0)


@SIZES
def test_measures_are_of_the_distribution_that_is_drawn_from(size: int) -> None:
    """Over the temperature, cut by the filters, the mask's probability included."""
    some = torch.tensor([0, 2, 3, 6])
    temperature = torch.tensor([1.0, 0.5, 2.0, 1.0]).double()
    top_p = torch.tensor([1.0, 0.9, 1.0, 1e-9]).double()
    measured = Draws(some, temperature, torch.tensor([0, 0, 4, 0]), top_p)
    asked = Rows(CELLS, None, measured, (), None, (), 0)
    assert not asked.plain

    def found(mesh: Mesh) -> Tensor:
        proposal = propose(shard_of(mesh, logits()), asked, block(), None, MASK)
        assert proposal.measures is not None
        ids_BL = proposal.ids_BL.to(logits().dtype)
        return torch.stack([ids_BL, *proposal.measures])

    expected = torch.zeros(3, ROWS * LENGTH, dtype=torch.float64)
    for row, t, k, p in zip(some, temperature, (VOCAB, VOCAB, 4, VOCAB), top_p, strict=True):
        probs = (logits()[row] / t).softmax(-1)
        order = probs.argsort(descending=True, stable=True)
        kept = order[: max(1, min(k, int((probs[order].cumsum(0) < p).sum()) + 1))]
        probs = torch.zeros_like(probs).index_copy(0, kept, probs[kept] / probs[kept].sum())
        own = probs[logits()[row].index_fill(0, torch.tensor([MASK]), -torch.inf).argmax()]
        best = probs.topk(2).values
        entropy = -torch.xlogy(probs, probs).sum()
        expected[:, CELLS[row]] = torch.stack([own, best[0] - best[1], entropy])
    plain = propose(Logits(logits(), 0, Mesh()), rows(None), block(), None, MASK)
    for ids_BL, *measures in on_ranks(size, found):
        torch.testing.assert_close(torch.stack(measures).flatten(1), expected)
        assert torch.equal(ids_BL.long(), plain.ids_BL)


@SIZES
def test_tokens_without_confidence_are_proposed_all_the_same(size: int) -> None:
    """Confidences are the probabilities without them; proposals and log-probabilities stay."""
    ids = logits()[0].topk(2).indices

    def found(mesh: Mesh) -> Tensor:
        return as_one(propose(shard_of(mesh, logits()), doubting(ids), block(), None, MASK))

    plain = as_one(propose(Logits(logits(), 0, Mesh()), rows(None), block(), None, MASK))
    chosen_R1 = plain[0].flatten()[CELLS].long().unsqueeze(1)
    expected_R = logits().index_fill(1, ids, -torch.inf).softmax(-1).gather(1, chosen_R1)[:, 0]
    expected_R[1] -= 1  # the model would rather keep the mask
    assert expected_R[0] == 0
    for proposed, confidence, logprob in on_ranks(size, found):
        torch.testing.assert_close(torch.stack([proposed, logprob]), plain[[0, 2]])
        torch.testing.assert_close(confidence.flatten()[CELLS], expected_R)
