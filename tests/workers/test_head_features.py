"""What features read from the head's logits, and what makes a step store them."""

from typing import Any

import pytest
import torch
from torch import Tensor

from diffray.components.logits import Logits
from diffray.components.mesh import Mesh
from diffray.components.params import SamplingParams
from diffray.components.propose import Chosen, Draws, Rows, choose, propose_plain
from diffray.components.transforms import LogitBias
from diffray.kernels.credit import Credits, Gains, Memory, reward
from diffray.workers import batch_plan
from diffray.workers.features.credit import add_credit
from diffray.workers.features.distributions import Distributions
from diffray.workers.features.feature import Feature, StoredLogits
from diffray.workers.features.zero_confidence import ZeroConfidence
from diffray.workers.head_plan import HeadPlan, plan_head
from diffray.workers.messages import Request
from tests.helpers.head_rows import (
    CELLS,
    LENGTH,
    MASK,
    MASK_R1,
    ROWS,
    SIZES,
    VOCAB,
    as_one,
    block,
    kept_of,
    logits,
    shard_of,
)
from tests.helpers.threads import on_ranks
from tests.helpers.toy import ToyModel, last_update, prompt_of, run, toy_engine


@pytest.mark.parametrize(
    ("options", "policy", "plain"),
    [
        ({}, {}, True),
        ({"temperature": 0.7}, {}, True),
        ({"temperature": 0.7, "top_k": 3}, {}, False),
        ({"temperature": 0.7, "top_p": 0.5}, {}, False),
        ({"temperature": 0.7, "min_p": 0.1}, {}, False),
        ({"allowed_token_ids": [1, 2]}, {}, False),
        ({"logprobs": True, "top_logprobs": 2}, {}, False),
        ({}, {"zero_confidence_token_ids": [3]}, False),
        ({}, {"cfg_scale": 1.0}, False),
        ({}, {"iteration": {"kind": "soft"}}, False),
        ({}, {"decoder": {"kind": "entropy_bound"}}, False),
        ({}, {"decoder": {"kind": "credit"}}, True),
        ({"temperature": 0.7}, {"decoder": {"kind": "credit"}}, False),
    ],
)
def test_logits_are_stored_only_where_an_option_needs_them(
    monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], policy: dict[str, Any], plain: bool
) -> None:
    seen: list[bool] = []

    def noted(plan: batch_plan.BatchPlan) -> HeadPlan:
        found = plan_head(plan)
        seen.append(found.plain)
        return found

    monkeypatch.setattr(batch_plan, "plan_head", noted)
    params = SamplingParams(max_tokens=8, diffusion=policy, **options)
    run(toy_engine(ToyModel()), [Request(0, prompt_of(5), params)])
    assert set(seen) == {plain}


def chosen_after(feature: Feature, stored: Logits) -> Chosen:
    """Return the tokens chosen from logits that a feature has read."""
    nothing: Any = None
    feature.read(nothing, StoredLogits(nothing, stored, nothing, block(), nothing, 0))
    return choose(stored, Rows(CELLS), block(), MASK)


def ranking(**options: Any) -> dict[int, float]:
    """Return the ranking of the first token."""
    params = SamplingParams(max_tokens=1, logprobs=True, top_logprobs=20, **options)
    _, update = last_update(toy_engine(ToyModel()), Request(0, prompt_of(5), params))
    (top,) = update.top_logprobs
    return dict(top)


def test_tokens_without_confidence_are_ranked() -> None:
    plain = ranking()
    best, *_ = plain
    assert ranking(diffusion={"zero_confidence_token_ids": [best]}) == plain


def test_guidance_leaves_biases_as_they_are() -> None:
    """They are added once to guided logits, not to what guidance multiplies."""
    plain = ranking(diffusion={"cfg_scale": 1.5})
    first, second, *_ = plain
    found = ranking(diffusion={"cfg_scale": 1.5}, logit_bias={first: 0.5})
    gap = plain[first] - plain[second]
    assert found[first] - found[second] == pytest.approx(gap + 0.5)


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
    asked, steps = Rows(CELLS), range(LENGTH)

    def kept(mesh: Mesh) -> list[Tensor]:
        own, found = blank_credits(), []
        for step in steps:
            gather_RK = torch.cat([MASK_R1, own.known(CELLS)], dim=1)
            parts = kept_of(mesh, changing(step), gather_RK, None)
            after = reward(parts, own, CELLS, block().masked_BL, MASK)
            found.append(as_one(propose_plain(after, asked, block())))
        return [*found, *own.memory]

    def proposed(step: int, own: Credits | None) -> Tensor:
        stored = Logits(changing(step), 0, Mesh())
        if own is not None:
            add_credit(stored, own, asked, block())
        return as_one(choose(stored, asked, block(), MASK).proposal())

    own = blank_credits()
    expected = [proposed(step, own) for step in steps]
    without = proposed(3, None)
    assert not torch.equal(expected[-1][0], without[0])  # credit has changed some request's token
    for found in on_ranks(size, kept):
        for ours, theirs in zip(found, [*expected, *own.memory], strict=True):
            torch.testing.assert_close(ours, theirs)


@SIZES
def test_measures_are_of_the_distribution_that_is_drawn_from(size: int) -> None:
    """Over the temperature, cut by the filters, the mask's probability included."""
    some = torch.tensor([0, 2, 3, 6])
    temperature = torch.tensor([1.0, 0.5, 2.0, 1.0]).double()
    top_p = torch.tensor([1.0, 0.9, 1.0, 1e-9]).double()
    draws = Draws(some, temperature, torch.tensor([0, 0, 4, 0]), top_p)

    def found(mesh: Mesh) -> Tensor:
        feature = Distributions()
        feature.draws = draws
        chosen = chosen_after(feature, shard_of(mesh, logits()))
        proposal = feature.inspect(chosen, chosen.proposal())
        assert proposal.measures is not None
        return torch.stack([proposal.ids_BL.to(logits().dtype), *proposal.measures])

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
    plain = choose(Logits(logits(), 0, Mesh()), Rows(CELLS), block(), MASK).proposal()
    for ids_BL, *measures in on_ranks(size, found):
        torch.testing.assert_close(torch.stack(measures).flatten(1), expected)
        assert torch.equal(ids_BL.long(), plain.ids_BL)


@SIZES
def test_tokens_without_confidence_are_proposed_all_the_same(size: int) -> None:
    """Confidences are the probabilities without them; proposals and log-probabilities stay."""
    ids = logits()[0].topk(2).indices

    rows_E = torch.arange(len(CELLS)).repeat_interleave(len(ids))
    bias = LogitBias(rows_E, ids.repeat(len(CELLS)), torch.full((len(rows_E),), -torch.inf))

    def found(mesh: Mesh) -> Tensor:
        feature = ZeroConfidence()
        feature.bias = bias
        chosen = chosen_after(feature, shard_of(mesh, logits()))
        return as_one(feature.inspect(chosen, chosen.proposal()))

    plain = as_one(choose(Logits(logits(), 0, Mesh()), Rows(CELLS), block(), MASK).proposal())
    chosen_R1 = plain[0].flatten()[CELLS].long().unsqueeze(1)
    expected_R = logits().index_fill(1, ids, -torch.inf).softmax(-1).gather(1, chosen_R1)[:, 0]
    expected_R[1] -= 1  # the model would rather keep the mask
    assert expected_R[0] == 0
    for proposed, confidence, logprob in on_ranks(size, found):
        torch.testing.assert_close(torch.stack([proposed, logprob]), plain[[0, 2]])
        torch.testing.assert_close(confidence.flatten()[CELLS], expected_R)
