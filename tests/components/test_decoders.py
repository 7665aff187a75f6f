"""Each decoder's rule, on confidences written by hand."""

from dataclasses import replace

import pytest
import torch

from diffray.components.block import Measures
from diffray.components.caches.none import NoCache
from diffray.components.canvas import Canvas
from diffray.components.decoder import Decoder
from diffray.components.decoders.budget_threshold import BudgetThreshold
from diffray.components.decoders.credit import Credit
from diffray.components.decoders.edit import Edit
from diffray.components.decoders.entropy_bound import EntropyBound
from diffray.components.decoders.factor import Factor
from diffray.components.decoders.fixed import Fixed
from diffray.components.decoders.hierarchy import Hierarchy
from diffray.components.decoders.origin import Origin
from diffray.components.decoders.schedule import Schedule
from diffray.components.decoders.sequential import Sequential
from diffray.components.decoders.threshold import Threshold
from diffray.components.iterations import Blockwise, FirstToken, Iteration
from diffray.components.params import SamplingParams
from diffray.components.policy import Policy
from diffray.components.sequence import Sequence
from diffray.kernels.credit import Credits, Gains, Memory, remember
from tests.helpers.decoding import DECIDED, accepted, block_of, proposal_of
from tests.helpers.toy import toy_spec

SHARES = (0.5, 0.95, 0.7, 0.6, 0.5, DECIDED, DECIDED, DECIDED)  # of 8 positions in 3 steps: 3, 3, 2
LEFT = (DECIDED, 0.2, DECIDED, 0.9, 0.1, 0.8, DECIDED, 0.5)
RUNS = (0.5, 0.6, DECIDED, 0.3, 0.2, DECIDED, 0.95, 0.91, 0.1)
LATER = (DECIDED, 0.9, 0.8, 0.7, 0.65, 0.3, 0.3, 0.3)
NATS = (0.9, 0.7, 0.8, DECIDED, 0.1)  # entropies of 0.1, 0.3, 0.2 and 0.9
STEPPED = Threshold(threshold=0.9, steps_per_block=3)
BUDGET = BudgetThreshold(steps=4, threshold=0.6)  # of 8 positions: 2 a step
ACCEPTED: list[tuple[Decoder, tuple[float, ...], list[int]]] = [
    (Threshold(threshold=0.9), (0.9, 0.95, 0.89), [0, 1]),  # equality is enough
    (Threshold(threshold=0.9), (0.5, 0.7, 0.7 - 1e-6, 0.6), [1, 2]),  # the best and its ties
    (Threshold(threshold=0.9), (DECIDED, 0.2, DECIDED), [1]),
    (Threshold(threshold=0.9), (DECIDED, DECIDED), []),
    (Threshold(threshold=0.9), (-0.9, -0.6, -0.8), [1]),  # the least bad where all prefer the mask
    # With steps: at least the share of each step, without equality and ties.
    (STEPPED, SHARES, [1, 2, 3]),
    (STEPPED, (*[0.95] * 5, *SHARES[5:]), [0, 1, 2, 3, 4]),
    (STEPPED, (0.2, *[DECIDED] * 7), [0]),
    (Threshold(threshold=0.9, steps_per_block=4), (0.9, 0.9, 0.9, 0.1), [0]),
    (Threshold(threshold=1, steps_per_block=4), (1.0, 1.0, 1.0, 1.0), [0]),
    # The leftmost masks.
    (Sequential(), LEFT, [1]),
    (Sequential(steps_per_block=3), LEFT, [1, 3, 4]),
    (Sequential(steps_per_block=3), (*[DECIDED] * 7, 0.2), [7]),
    (Sequential(steps_per_block=99), LEFT, [1]),
    # One anchor of each run, and all above the threshold; comparisons are strict.
    (Hierarchy(threshold=0.9, low_threshold=0.4), RUNS, [1, 6, 7]),
    (Hierarchy(threshold=0.9, low_threshold=0.5), (0.95, 0.9, DECIDED, 0.5), [0]),
    (Hierarchy(low_threshold=0.62), (0.1, 0.3, DECIDED, 0.2), [1]),
    # The longest prefix of the sorted: one needs 0.5, two 0.667, three 0.75, four 0.8.
    (Factor(factor=1), (0.7, 0.99, 0.76, 0.75, 0.1), [1, 2, 3]),
    (Factor(factor=1), (0.1, 0.2, 0.15), [1]),
    (Factor(factor=1), (0.7, 0.99, 0.76, 0.75), [0, 1, 2, 3]),  # the last mask is taken along
    (Factor(factor=1), (DECIDED, 0.2, 0.1), [1, 2]),
    # Editing fills masks as a threshold does.
    (Edit(threshold=0.5), (0.2, 0.4, 0.1), [1]),
    (Edit(threshold=0.5), (0.5, 0.4), [0]),
    (Edit(threshold=0.9, steps_per_block=3), SHARES, [1, 2, 3]),
    (Origin(steps=1), (0.5, DECIDED, 0.1, 0.2), [0, 2, 3]),
    (BUDGET, (*[0.9] * 3, *[0.7] * 5), [0, 1]),
    (BUDGET, (0.9, *[0.3] * 7), [0]),
    (BUDGET, (*[0.3] * 7, 0.4), [7]),
    # Before the last, entropies have at most gamma together; what is certain goes together.
    (EntropyBound(gamma=0), NATS, [0]),
    (EntropyBound(gamma=0.11), NATS, [0, 2]),
    (EntropyBound(gamma=0.31), NATS, [0, 1, 2]),
    (EntropyBound(gamma=0.61), NATS, [0, 1, 2, 4]),
    (EntropyBound(gamma=0), (1.0, 1.0, 0.5, 0.4), [0, 1, 2]),
    (EntropyBound(gamma=9), (-0.1, 0.5, -0.2), [1]),
]


# Of a later step of the block.
LATER_ACCEPTED: list[tuple[Decoder, tuple[float, ...], list[int], int]] = [
    (STEPPED, SHARES, [1, 2], 2),
    (Sequential(steps_per_block=3), LEFT, [1, 3], 2),
    (Edit(threshold=0.9, steps_per_block=3), SHARES, [1, 2], 2),
    (BUDGET, LATER, [1, 2, 3], 1),  # one of the four that were allowed is final
    (BUDGET, LATER, [1, 2, 3, 4], 9),  # after the last step everything is allowed
]


@pytest.mark.parametrize(
    ("decoder", "row", "expected", "step"), [*((*each, 0) for each in ACCEPTED), *LATER_ACCEPTED]
)
def test_of_a_step_it_accepts(
    decoder: Decoder, row: tuple[float, ...], expected: list[int], step: int
) -> None:
    assert accepted(decoder, *row, step_in_block_B=torch.tensor([step])) == expected


@pytest.mark.parametrize(
    "decoder",
    [Threshold(threshold=0.5), Edit(threshold=0.5), Threshold(threshold=0.5, steps_per_block=4)],
)
def test_a_floor_raises_the_threshold(decoder: Decoder) -> None:
    floor = torch.tensor([0.8], dtype=torch.float64)
    assert accepted(decoder, 0.6, 0.9, 0.85, 0.1) == [0, 1, 2]
    assert accepted(decoder, 0.6, 0.9, 0.85, 0.1, floor_B=floor) == [1, 2]


@pytest.mark.parametrize(("steps", "shares"), [(3, [4, 3, 3]), (10, [1] * 10), (1, [10])])
def test_fixed_spreads_masks_over_steps_the_odd_ones_first(steps: int, shares: list[int]) -> None:
    """And its steps over the blocks."""
    masked = torch.ones(1, 10, dtype=torch.bool)
    found = []
    for step in range(steps):
        block = block_of(masked, step_in_block_B=torch.tensor([step]))
        mask = Fixed(steps=steps).accept(proposal_of(torch.rand(1, 10)), block)
        found.append(int(mask.sum()))
        masked = masked & ~mask
    assert found == shares and not masked.any()
    masked = torch.ones(3, 8, dtype=torch.bool)
    blocks = block_of(masked, index_B=torch.arange(3), count_B=torch.tensor([3, 3, 3]))
    mask = Fixed(steps=8).accept(proposal_of(torch.rand(3, 8)), blocks)
    assert mask.sum(-1).tolist() == [4, 3, 3]  # 2, 3 and 3 steps


@pytest.mark.parametrize(
    ("steps", "length", "shares"),
    [
        (4, 10, (2, 3, 2, 3)),  # the first of 2.5
        (7, 16, (2, 2, 2, 2, 3, 2, 3)),
        (2, 3, (2, 1)),
        (10**8, 3, (1, 1, 1)),
    ],
)
def test_fixed_rounds_halves_to_even(steps: int, length: int, shares: tuple[int, ...]) -> None:
    """And each block gets as many steps, rounded up."""
    rounding = Fixed(steps=steps, rounding="half_even")
    assert rounding.shares(sequence_of(length, Blockwise())) == shares
    sequence = sequence_of(length, Blockwise(), blocks=3)
    assert Fixed(steps=3 * steps - 2, rounding="half_even").shares(sequence) == shares


def test_random_remasking_ignores_confidence_and_depends_on_the_seed() -> None:
    confidence = torch.linspace(0, 1, 64).expand(2, 64)
    block = block_of(torch.ones(2, 64, dtype=torch.bool), seed_B=torch.tensor([1, 2]))
    mask = Fixed(steps=8, remasking="random").accept(proposal_of(confidence), block)
    assert mask.sum(-1).tolist() == [8, 8] and mask[0].tolist() != mask[1].tolist()
    assert mask[0, :56].any()


def test_edit_replaces_written_tokens_only_where_sure_and_different() -> None:
    decoder = Edit(threshold=0.5, edit_threshold=0.4)
    row = torch.tensor([[0.9, 0.45, 0.3, 0.9, 0.6]], dtype=torch.float64)
    masked = torch.tensor([[False, False, False, False, True]])
    written = torch.tensor([[True, True, True, False, False]])
    ids = torch.tensor([[10, 0, 0, 0, 0]])  # the first already holds what is proposed
    mask = decoder.accept(proposal_of(row), block_of(masked, editable_BL=written, ids_BL=ids))
    assert mask.tolist() == [[False, True, False, False, True]]


def test_edit_s_presets_give_way_to_what_is_given() -> None:
    assert Edit(preset="speed").threshold == Edit().threshold == 0.5
    assert Edit(preset="speed").edit_threshold == Edit().edit_threshold == 0.0
    quality = Edit(preset="quality")
    assert (quality.threshold, quality.edit_threshold) == (0.7, 0.5)
    assert Edit(preset="quality", threshold=0.9).threshold == 0.9
    assert Edit.model_validate_json(quality.model_dump_json()) == quality
    for wrong in ("fast", ["quality"]):
        with pytest.raises(ValueError, match=r"decoder\.preset: .*'speed' or 'quality'"):
            SamplingParams(diffusion={"decoder": {"kind": "edit", "preset": wrong}})


def test_credit_equals_the_dense_definition() -> None:
    gain = Credit(alpha=0.7, gamma=0.2, decay=0.8).gain()
    draw = torch.Generator().manual_seed(0)
    rows, length, vocab = 3, 6, 11
    cells = torch.arange(rows * length)
    dense = torch.zeros(rows * length, vocab, dtype=torch.float64)
    blank = torch.zeros(rows, length, length, dtype=torch.float64)
    gains = Gains(*(torch.full((rows,), number).double() for number in gain))
    credits = Credits(Memory(blank.long() - 1, blank), gains)
    masked = torch.ones(rows, length, dtype=torch.bool)
    for _ in range(length):
        top = torch.randint(0, vocab, (rows * length,), generator=draw)
        prob = torch.rand(rows * length, generator=draw, dtype=torch.float64)
        ids, values = remember(credits, cells, masked, top, prob.log())
        gained = (prob**0.2 * masked.flatten()).unsqueeze(-1)
        dense = (dense * 0.8).scatter_add(-1, top.unsqueeze(-1), gained)
        spread = torch.zeros(rows * length, vocab + 1, dtype=torch.float64)
        spread.scatter_(-1, ids % (vocab + 1), values)
        expected = 0.7 * torch.log1p(dense)
        assert torch.allclose(spread[:, :vocab], expected)
        assert (spread[:, vocab] == 0).all()
        masked[:, 0] = False  # a decided position gains nothing more


@pytest.mark.parametrize(("order", "best"), [("probability", 0), ("margin", 1), ("entropy", 2)])
def test_a_schedule_takes_the_surest_of_what_is_planned(order: str, best: int) -> None:
    decoder = Schedule.model_validate({"order": order})
    assert accepted(decoder, 0.5, 0.9, DECIDED, 0.7, share=2) == [1, 3]
    assert accepted(decoder, 0.5, 0.9, DECIDED, 0.7, share=0) == []
    # What the model would rather keep masked comes last, in order.
    assert accepted(decoder, -0.1, -0.2, 0.1, share=2) == [0, 2]
    # By the measure that it is told to order by.
    measures = [[0.6, 0.5, 0.4]], [[0.1, 0.3, 0.2]], [[2.0, 1.5, 1.0]]
    proposal = proposal_of(torch.tensor([[0.3] * 3]))
    proposal = replace(proposal, measures=Measures(*map(torch.tensor, measures)))
    mask = decoder.accept(proposal, block_of(torch.ones(1, 3, dtype=torch.bool), share=1))
    assert mask.tolist() == [[place == best for place in range(3)]]


def sequence_of(length: int, iteration: Iteration, blocks: int = 1) -> Sequence:
    policy = Policy(length, 0, iteration, Schedule(), NoCache(), 0.0)
    params = SamplingParams(max_tokens=length * blocks)
    canvas = Canvas((1, 2), (), params.max_tokens, policy, toy_spec(), 2**62)
    return Sequence(0, params, canvas, frozenset())


@pytest.mark.parametrize("iteration", [Blockwise(), FirstToken()], ids=["all", "first"])
@pytest.mark.parametrize("eps", [0.0, 1e-3, 0.5, 1.0])
@pytest.mark.parametrize("length", [1, 2, 19, 64])
@pytest.mark.parametrize("steps", [1, 2, 19, 64, 4096])
def test_a_schedule_ends_in_time(steps: int, length: int, eps: float, iteration: Iteration) -> None:
    shares = Schedule(steps=steps, eps=eps).shares(sequence_of(length, iteration))
    assert sum(shares) == length and min(shares) >= 1
    assert len(shares) <= steps + iteration.first_alone
    assert shares[0] == 1 or not iteration.first_alone
    # The steps are spread over the blocks. What each takes is compared with Dream's own tokens.
    in_blocks = sequence_of(8, Blockwise(), blocks=3)
    assert Schedule(steps=6, eps=0.0).shares(in_blocks) == (4, 4)


def test_origin_decides_each_position_at_a_time_of_its_own() -> None:
    """After n of N steps a share of 1 - n / N is left, whatever is decided with it."""
    many, steps = 20_000, 4
    decoder = Origin(steps=steps, eps=0.0)
    masked = torch.ones(1, many, dtype=torch.bool)
    proposal = proposal_of(torch.full((1, many), 0.5, dtype=torch.float64))
    for step in range(steps):
        masked = masked & ~decoder.accept(proposal, block_of(masked))
        assert masked.double().mean() == pytest.approx(1 - (step + 1) / steps, abs=0.02)
    assert not masked.any()


@pytest.mark.parametrize(
    "decoder",
    [
        Threshold(), Threshold(steps_per_block=5), Fixed(), Hierarchy(), Factor(), Credit(), Edit(),
        Edit(preset="quality", steps_per_block=5), Schedule(order="probability"),
        Schedule(order="margin"), Schedule(order="entropy"), Origin(steps=5),
        BudgetThreshold(steps=3, threshold=0.5), EntropyBound(gamma=0.7),
    ],
    ids=lambda d: d.kind,
)  # fmt: skip
def test_rows_do_not_depend_on_each_other(decoder: Decoder) -> None:
    draw = torch.Generator().manual_seed(1)
    confidence = torch.rand(5, 12, generator=draw, dtype=torch.float64)
    masked = torch.rand(5, 12, generator=draw) > 0.4
    masked[:, 3] = True
    proposal = proposal_of(confidence.masked_fill(~masked, -torch.inf))
    block = block_of(masked, seed_B=torch.arange(5))
    together = decoder.accept(proposal, block)
    assert (together & masked).any(-1).all()
    for row in range(5):
        index = torch.tensor([row])
        alone = decoder.accept(proposal.rows(index), block.rows(index, [row]))
        assert torch.equal(alone[0], together[row])
