"""Sampling and reductions over a vocabulary that may be cut over ranks; counter-based noise."""

import pytest
import torch
from torch import Tensor

from diffray.components.logits import Logits
from diffray.components.mesh import Mesh
from diffray.kernels import noise
from tests.helpers.threads import on_ranks, over_ranks

ROWS, VOCAB = 40, 24


def values() -> Tensor:
    draw = torch.Generator().manual_seed(3)
    found = torch.randn(ROWS, VOCAB, generator=draw, dtype=torch.float64) * 2
    found[9, [2, 13, 20]] = 9.0  # a tie, on several ranks
    return found


def draw_ids(logits: Logits, temperature: float, top_k: int, top_p: float) -> Tensor:
    rows = torch.arange(logits.values_RV.shape[0])
    filters = torch.full((len(rows),), temperature).double(), torch.full((len(rows),), top_k)
    kept = logits.filtered(rows, *filters, torch.full((len(rows),), top_p).double())
    return kept.draw((rows * 0 + 7, rows, rows * 0))


def answers(mesh: Mesh) -> Tensor:
    """Ask everything there is to ask, in one row per row."""
    start, stop = mesh.shard(VOCAB, "vocabulary")
    logits = Logits(values()[:, start:stop].clone(), start, mesh)
    logits.add(torch.tensor([0, 0, 5]), torch.tensor([3, 20, 11]), torch.tensor([9.0, -9.0, 50.0]))
    lse = logits.logsumexp()
    picked = logits.gather(torch.tensor([[0, 23, 11]]).expand(ROWS, 3))
    logits.forbid(11)
    best, ids = logits.best()
    drawn = [
        draw_ids(logits, *filters) for filters in ((1.0, 0, 1.0), (0.7, 5, 1.0), (1.5, 9, 0.6))
    ]
    best_few, top = logits.top((slice(0, 9), slice(20, ROWS)), 10)
    ranked = torch.zeros(ROWS, 20, dtype=torch.float64)
    ranked[: len(top)] = torch.cat([best_few, top.double()], dim=1)
    logits.keep_only(slice(4, 30), torch.tensor([0, 7, 7, 12, 23]))
    best_kept, kept = logits.best()
    columns = [lse, *picked.T, best, ids.double(), *(d.double() for d in drawn)]
    columns += [*ranked.T, best_kept, kept.double()]
    return torch.stack(columns, dim=1)


@pytest.mark.parametrize("size", [2, 4])
def test_ranks_agree_with_one_rank(size: int) -> None:
    """Also about ties, and they meet a few times only, whatever the filters."""
    whole = answers(Mesh())
    ranks, collectives = over_ranks(size, False, answers)
    assert collectives < 40
    for found in ranks:
        assert torch.allclose(found, whole, rtol=0, atol=1e-12)


def test_the_answers_are_what_they_say() -> None:
    logits = Logits(values(), 0, Mesh())
    found, ids = logits.top((slice(3, 5), slice(10, 11)), 6)
    expected = values()[[3, 4, 10]].sort(descending=True)
    assert torch.equal(found, expected.values[:, :6])
    assert torch.equal(ids, expected.indices[:, :6])
    assert logits.top((slice(0, 2),), 99)[0].shape == (2, VOCAB)
    assert int(logits.best()[1][9]) == 2  # of equals the lowest id
    logits.keep_only(slice(3, 5), torch.tensor([0, 7]))
    kept = logits.values_RV.isfinite()
    assert kept[3:5].nonzero().tolist() == [[0, 0], [0, 7], [1, 0], [1, 7]]
    assert kept[:3].all() and kept[5:].all()


def kept_by_sorting(row: Tensor, top_k: int, top_p: float) -> set[int]:
    """Return what may be drawn: the definition, for values without ties."""
    values, ids = row.sort(descending=True)
    count = min(top_k, len(row)) if top_k else len(row)
    mass = values[:count].softmax(-1)
    enough = int((mass.cumsum(-1) < top_p).sum()) + 1 if top_p < 1 else count
    return set(ids[: min(enough, count)].tolist())


@pytest.mark.parametrize("size", [1, 3])
def test_filters_keep_what_sorting_keeps(size: int) -> None:
    draw = torch.Generator().manual_seed(5)
    many = 500
    for _ in range(6):
        row = torch.randn(VOCAB, generator=draw) * 0.3
        row[:4] = -torch.inf  # forbidden ids count for nothing
        top_k = int(torch.randint(0, 15, (), generator=draw))
        top_p = float(torch.rand((), generator=draw)) * 0.7 + 0.4

        def drawn(
            mesh: Mesh, row: Tensor = row, top_k: int = top_k, top_p: float = top_p
        ) -> Tensor:
            start, stop = mesh.shard(VOCAB, "vocabulary")
            part = row[start:stop].expand(many, -1).clone()
            return draw_ids(Logits(part, start, mesh), 1.0, top_k, top_p)

        expected = kept_by_sorting(row.double(), top_k, top_p) - {0, 1, 2, 3}
        for found in on_ranks(size, drawn):
            assert set(found.tolist()) == expected


def test_samples_follow_the_distribution() -> None:
    probs = torch.tensor([0.5, 0.25, 0.15, 0.1], dtype=torch.float64)
    many = 10_000
    logits = Logits(probs.log().expand(many, 4).clone(), 0, Mesh())
    shares = torch.bincount(draw_ids(logits, 1.0, 0, 1.0), minlength=4) / many
    assert torch.allclose(shares.double(), probs, atol=0.02)


def test_noise_is_uniform_and_uncorrelated() -> None:
    many = 50_000
    seeds = torch.full((many,), 1234567890123)
    places, steps = torch.arange(many), torch.zeros(many, dtype=torch.long)
    first = noise.uniform(seeds, places, steps)
    assert float(first.min()) > 0 and float(first.max()) < 1
    shares = torch.histc(first.float(), 20, 0, 1) / many
    assert torch.allclose(shares, torch.full((20,), 0.05), atol=0.005)
    for other in (
        noise.uniform(seeds + 1, places, steps),
        noise.uniform(seeds + 2**32, places, steps),
        noise.uniform(seeds, places + 1, steps),
        noise.uniform(seeds, places, steps + 1),
    ):
        correlation = torch.corrcoef(torch.stack([first, other]))[0, 1]
        assert abs(float(correlation)) < 0.02


def test_choices_get_seeds_of_their_own() -> None:
    seeds = [noise.derived_seed(42, index) for index in range(50)]
    assert seeds[0] == 42
    assert len(set(seeds)) == 50
    assert all(-(2**63) <= seed < 2**63 for seed in seeds)
