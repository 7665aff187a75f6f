"""A variant is used if it computes what the reference does and is faster, else it is refused."""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from diffray.kernels import confidence, norm, router
from diffray.kernels.confidence import Confidence, Draw
from diffray.kernels.numeric_errors import choice_error, confidence_error, largest_error
from diffray.kernels.trial import Call, Outcome, Record, Selection, attempt, choices_of
from diffray.kernels.variants import Kernel, Run, Shape, Variant
from tests.helpers.replays import again, frozen

SHAPE = Shape((16,), (4,))
WEIGHT = torch.linspace(0.5, 1.5, 16)


def kernel(reference: Run = norm.rms_norm, **more: Any) -> Kernel:
    return Kernel("rms_norm", reference, lambda *_: SHAPE, lambda *_: [], **more)


def seconds(run: Run) -> float:
    run()
    return 1.0


def tried(
    run: Run,
    *,
    dtype: torch.dtype = torch.float32,
    tolerance: float = 1.0,
    record: Record | None = None,
    owner: Kernel | None = None,
) -> Outcome:
    torch.manual_seed(0)
    args = torch.randn(4, 16, dtype=dtype), WEIGHT.to(dtype), 1e-5
    calls = [Call(owner or kernel(), args, {})]
    return attempt(calls, Variant("mine", run, tolerance), seconds, record)


def off_by(share: float) -> Run:
    """Return a norm of which one number of 64 is wrong by this share of a usual one."""

    def run(x: Tensor, weight: Tensor, eps: float) -> Tensor:
        out = norm.rms_norm(x, weight, eps)
        out[2, 3] += share
        return out

    return run


@pytest.mark.parametrize(
    ("dtype", "within", "beyond"),
    [(torch.float32, 1e-5, 1e-3), (torch.float16, 1e-3, 3e-2), (torch.bfloat16, 2e-2, 0.2)],
)
def test_one_wrong_number_is_enough_to_be_refused(
    dtype: torch.dtype, within: float, beyond: float
) -> None:
    """Unless the variant states a larger tolerance of its own."""
    right, wrong = (tried(off_by(share), dtype=dtype) for share in (within, beyond))
    assert right.refused == "" and right.launched_s == 1.0
    assert wrong.refused.startswith("wrong: error ") and wrong.seconds is None
    assert wrong.error is not None and right.error is not None and wrong.error > right.error
    assert not tried(off_by(beyond), dtype=dtype, tolerance=100.0).refused


def unwritten(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Write all rows but the last, in memory that may hold the right result of another."""
    out = torch.empty_like(x)
    out[:-1] = norm.rms_norm(x[:-1], weight, eps)
    return out


def failing(*_: Any) -> Any:
    raise RuntimeError("out of registers\nand more")


@pytest.mark.parametrize(
    ("run", "message"),
    [
        (lambda x, *_: torch.full_like(x, math.nan), "wrong: error inf"),
        (lambda x, *_: torch.full_like(x, math.inf), "wrong: error inf"),
        (unwritten, "wrong: error inf"),
        (lambda x, *_: x[:2], "wrong: error inf"),
        (lambda x, *_: x.double(), "wrong: error inf"),
        (failing, "RuntimeError: out of registers"),
    ],
)
def test_nan_unwritten_values_and_other_shapes_are_refused(run: Run, message: str) -> None:
    tried(norm.rms_norm)  # its result may lie where the next one is allocated
    outcome = tried(run)
    assert outcome.refused.startswith(message) and "\n" not in outcome.refused


def test_every_call_of_a_shape_is_compared() -> None:
    def wrong_for_zeros(x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return norm.rms_norm(x, weight, eps) + (not x.any())

    args = WEIGHT, 1e-5
    calls = [Call(kernel(), (x, *args), {}) for x in (torch.ones(4, 16), torch.zeros(4, 16))]
    variant = Variant("mine", wrong_for_zeros)
    assert not attempt(calls[:1], variant, seconds, None).refused
    assert attempt(calls, variant, seconds, None).refused


def test_what_a_kernel_stores_is_compared_and_left_as_it_was() -> None:
    pool = torch.zeros(6, 16)

    def store(slots: list[int], value: float = 1.0) -> Run:
        def run(x: Tensor, *_: Any) -> Tensor:
            pool[slots] = value
            return x.clone()

        return run

    owner = kernel(store([1, 2]), written=lambda *_: (pool,))
    assert not tried(store([1, 2]), owner=owner).refused
    for wrong in (store([1, 3]), store([1, 2, 5]), store([]), store([1, 2], 1.1)):
        pool.zero_()
        assert tried(wrong, owner=owner).refused
        assert not pool.any()


def test_a_kernel_that_adds_to_what_it_stored_is_replayed_from_where_it_began() -> None:
    """As one that ends a step does, each run of which changes what the next one would store."""
    pool = torch.ones(4, 16)

    def adding(value: float) -> Run:
        def run(x: Tensor, *_: Any) -> Tensor:
            return x + pool.add_(value)

        return run

    owner = kernel(adding(0.5), written=lambda *_: (pool,))
    right = tried(adding(0.5), owner=owner, record=again)
    assert right.refused == "" and right.replayed_s == 1.0
    assert (pool == 1).all()  # every variant is tried on the same
    assert tried(adding(0.6), owner=owner, record=again).refused


def test_a_replay_is_compared_and_timed_too() -> None:
    right = tried(norm.rms_norm, record=again)
    assert right.replayed_s == right.seconds == 1.0 and not right.spoiled
    assert tried(norm.rms_norm, record=frozen).refused.endswith("when replayed")
    failed = tried(norm.rms_norm, record=failing)
    assert failed.refused.startswith("when recorded: RuntimeError: out of registers")
    assert failed.spoiled
    # Torch is not recorded where it asks the host.
    owner = kernel(recordable=lambda x, *_: x.shape[0] > 4)
    call = Call(owner, (torch.ones(4, 16), WEIGHT, 1e-5), {})
    torch_s = attempt([call], Variant("torch", norm.rms_norm), seconds, failing)
    assert not torch_s.refused and torch_s.replayed_s is None and torch_s.launched_s == 1.0


def outcome(variant: str, launched_s: float, replayed_s: float | None = None) -> Outcome:
    return Outcome("rms_norm", SHAPE, variant, "", 0.0, launched_s, replayed_s)


SLOW, QUICK, TORCH = outcome("a", 3.0), outcome("b", 2.0), outcome("torch", 4.0)
EARLY, DEFAULT = replace(outcome("early", 3.0), early_s=1.5), replace(SLOW, default=True)


@pytest.mark.parametrize(
    ("found", "selection", "chosen"),
    [
        ([SLOW, QUICK, TORCH], "fastest", "b"),
        # What can be recorded goes first, and replays decide.
        ([outcome("torch", 1.0), outcome("c", 3.0, 2.0), outcome("d", 2.0, 2.5)], "fastest", "c"),
        # What starts early is given what it may save in a step.
        ([DEFAULT, QUICK, EARLY], "fastest", "b"),
        ([DEFAULT, QUICK, EARLY], "early", "early"),
        ([DEFAULT, QUICK, EARLY], "defaults", "a"),
    ],
)
def test_the_fastest_right_one_is_chosen(
    found: list[Outcome], selection: Selection, chosen: str
) -> None:
    choices = choices_of(found, selection)
    assert choices.chosen == {("rms_norm", SHAPE): chosen}
    assert choices.tried == {"rms_norm"}


def test_each_shape_has_its_choice_and_what_is_refused_at_one_is_used_at_none() -> None:
    other = Shape((16,), (8,))
    found = [SLOW, QUICK, TORCH, replace(outcome("a", 1.0), shape=other)]
    choices = choices_of(found)
    assert choices.chosen == {("rms_norm", SHAPE): "b", ("rms_norm", other): "a"}
    assert choices.right == {("rms_norm", name) for name in ("a", "b", "torch")}
    choices = choices_of([*found, Outcome("rms_norm", other, "b", "wrong")])
    assert set(choices.chosen.values()) == {"a"}
    assert choices.right == {("rms_norm", name) for name in ("a", "torch")}


def routed(change: Callable[..., None] | None = None, tokens: int = 40) -> float:
    torch.manual_seed(1)
    args = torch.randn(tokens, 8), torch.randn(16, 8), None, 4
    chosen = router.softmax_router(*args)
    found = [*chosen[:2], *router.list_pairs(chosen.ids_TK, 16)]
    got = [tensor.clone() for tensor in found]
    if change is not None:
        change(*got)
    return choice_error(args, got, found)


def test_routers_may_swap_near_equals_and_nothing_else() -> None:
    def swap_two(ids: Tensor, _weights: Tensor, *pairs: Tensor) -> None:
        ids[0, :2] = ids[0, :2].flip(0)
        for old, new in zip(pairs, router.list_pairs(ids, 16), strict=True):
            old.copy_(new)

    def other_ids(ids: Tensor, *_: Tensor) -> None:
        ids[:3] = 15 - ids[:3]

    def other_weights(_ids: Tensor, weights: Tensor, *_: Tensor) -> None:
        weights[7, 2] *= 1.01

    def other_pairs(_ids: Tensor, _weights: Tensor, _starts: Tensor, order: Tensor) -> None:
        order[:2] = order[:2].flip(0)

    assert routed() == routed(swap_two) == 0.0
    assert routed(other_ids) == math.inf
    assert routed(other_pairs) == math.inf
    assert 1e-3 < routed(other_weights) < 1e-1


HIDDEN = torch.arange(40.0).sin().view(5, 8)
HEAD = (torch.arange(160.0) * 1.7).cos().view(20, 8)
FORBIDDEN = 19


def chose(change: dict[str, Any], *, drawn: bool = False) -> float:
    rows = torch.arange(5)
    draw = Draw(torch.tensor([0.0, 0.5, 1.0, 1.0, 0.0]), rows * 7, rows, rows) if drawn else None
    args = HIDDEN, HEAD, 0, FORBIDDEN, torch.full((5, 1), FORBIDDEN), draw
    expected = confidence.confidence(*args)
    return confidence_error(args, expected._replace(**change), expected)


@pytest.mark.parametrize("drawn", [False, True])
def test_a_choice_must_be_allowed_and_have_the_score_that_it_claims(drawn: bool) -> None:
    asked = torch.full((5, 1), FORBIDDEN)
    expected: Confidence = confidence.confidence(HIDDEN, HEAD, 0, FORBIDDEN, asked, None)
    assert chose({}, drawn=drawn) < 1e-5
    assert chose({"ids_R": (expected.ids_R + 1) % 19}, drawn=drawn) > 1e-2
    assert chose({"ids_R": torch.full((5,), FORBIDDEN)}, drawn=drawn) == math.inf
    assert chose({"logsumexp_R": expected.logsumexp_R * 1.01}, drawn=drawn) > 1e-3
    assert chose({"best_R": expected.best_R * 1.01}, drawn=drawn) > 1e-3
    assert chose({"scores_R": expected.scores_R * 1.01}, drawn=drawn) > 1e-3
    # Of equal logits either id will do.
    args = HIDDEN, torch.cat([HEAD, HEAD]), 0, 41, torch.full((5, 1), 1), None
    expected = confidence.confidence(*args)
    other = expected._replace(ids_R=(expected.ids_R + 20) % 40)
    assert confidence_error(args, other, expected) < 1e-5
    # An infinite logit hides no error of its row.
    row = torch.tensor([1.0, -torch.inf, 2.0])
    assert largest_error((), [row.clone()], [row]) == 0.0
    assert largest_error((), [torch.tensor([1.5, -torch.inf, 2.0])], [row]) > 0.1
