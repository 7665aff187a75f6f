"""A program may run if it computes what the reference does; else a line says why not."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from diffray.kernels import confidence, norm, router
from diffray.kernels.confidence import Confidence, Draw
from diffray.kernels.kernel import Kernel, Run
from diffray.kernels.numeric_errors import choice_error, confidence_error, largest_error
from diffray.kernels.verify import verified

WEIGHT = torch.linspace(0.5, 1.5, 16)


def why_refused(program: Run, dtype: torch.dtype = torch.float32, **more: Any) -> str:
    torch.manual_seed(0)
    args = torch.randn(4, 16, dtype=dtype), WEIGHT.to(dtype), 1e-5
    out, why = verified(Kernel("rms_norm", norm.rms_norm, program, **more), args, {})
    assert torch.equal(out, norm.rms_norm(*args))
    return why


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
    """Unless the kernel states a larger tolerance, or that it computes in another dtype."""
    assert why_refused(off_by(within), dtype) == ""
    assert why_refused(off_by(beyond), dtype).startswith("wrong: error ")
    assert why_refused(off_by(beyond), dtype, tolerance=100.0) == ""
    assert why_refused(off_by(within), precision=lambda *_: dtype) == ""


def unwritten(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Write all rows but the last, in memory that may hold the right result of another."""
    out = torch.empty_like(x)
    out[:-1] = norm.rms_norm(x[:-1], weight, eps)
    return out


@pytest.mark.parametrize(
    "program",
    [
        lambda x, *_: torch.full_like(x, math.nan),
        lambda x, *_: torch.full_like(x, math.inf),
        unwritten,
        lambda x, *_: x[:2],
        lambda x, *_: x.double(),
        lambda *_: None,
    ],
)
def test_nan_unwritten_values_and_other_shapes_are_refused(program: Run) -> None:
    why_refused(norm.rms_norm)  # its result may lie where the next one is allocated
    assert why_refused(program).startswith("wrong: error inf")


def test_what_a_program_raises_is_said_in_one_line() -> None:
    def failing(*_: Any) -> Any:
        raise RuntimeError("out of registers\nand more")

    assert why_refused(failing) == "RuntimeError: out of registers"


def test_what_a_kernel_stores_is_compared_and_then_is_what_the_reference_stores() -> None:
    """Both add to what stood there."""
    pool = torch.ones(6, 16)

    def add(slots: list[int], value: float = 1.0) -> Run:
        def run(x: Tensor, *_: Any) -> Tensor:
            pool[slots] += value
            return x.clone()

        return run

    def refused(program: Run) -> str:
        pool.fill_(1.0)
        kernel = Kernel("rms_norm", add([1, 2]), program, written=lambda *_: (pool,))
        _, why = verified(kernel, (WEIGHT,), {})
        assert pool[:, 0].tolist() == [1, 2, 2, 1, 1, 1]
        return why

    assert not refused(add([1, 2]))
    for wrong in (add([1, 3]), add([1, 2, 5]), add([]), add([1, 2], 1.1)):
        assert refused(wrong)


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
