"""Each kernel with the inputs that a model's step gives it, and the least it must read and compute.

Letters: T packed tokens, R rows of the head, E experts, K experts of a token.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from inspect import signature
from typing import Any, NamedTuple

import torch
from torch import Tensor

from benchmarks.gpu.shapes import Shape
from benchmarks.gpu.windows import last_windows
from diffray.kernels.attention import QKRotary
from diffray.kernels.choose import Kernels
from diffray.kernels.confidence import Draw
from diffray.kernels.quantized import quantize_rows
from diffray.kernels.rope import rope_tables

EPS = 1e-5


class Rival(NamedTuple):
    """Another way to the same output, which is only timed."""

    name: str
    run: Callable[[], object]


@dataclass(frozen=True, slots=True)
class Case:
    """A kernel's call: `run` returns all that it computes, what it stores in place too."""

    kernel: str
    run: Callable[[Kernels], tuple[Tensor, ...]]
    bytes: float  # every input once, every output once
    flops: float = 0.0
    exact_ids: bool = False  # the first output is of integers that rounding may change
    rivals: tuple[Rival, ...] = ()


@dataclass(frozen=True, slots=True)
class Work:
    """A step's size: so many sequences, windows of a length, contexts of a length."""

    rows: int
    window: int
    context: int

    @property
    def tokens(self) -> int:
        return self.rows * min(self.window, self.context)


def cases(
    shape: Shape, work: Work, dtype: torch.dtype, device: torch.device | str
) -> Iterator[Case]:
    """Yield the kernels' calls of one layer and of the head, one after the other."""

    def normal(*size: int, scale: float = 1.0) -> Tensor:
        return torch.randn(size, device=device, dtype=dtype) * scale

    yield from _layer_cases(shape, work, normal)
    if shape.sparse is not None:
        yield from _expert_cases(shape, work, normal)
    yield from _head_cases(shape, work, normal)


Normal = Callable[..., Tensor]


def _layer_cases(shape: Shape, work: Work, normal: Normal) -> Iterator[Case]:
    tokens, hidden, size = work.tokens, shape.hidden, shape.head_dim
    x, residual, weight = normal(tokens, hidden), normal(tokens, hidden), normal(hidden)
    item = x.element_size()
    yield Case(
        "add_norm",
        lambda kernels: kernels.add_norm(x, residual, weight, EPS),
        4 * tokens * hidden * item,
    )
    yield Case(
        "rms_norm", lambda kernels: (kernels.rms_norm(x, weight, EPS),), 2 * tokens * hidden * item
    )

    batch = last_windows(work.rows, work.window, work.context, shape.block, x.device)
    slots = batch.num_pages * batch.windows.page_size
    keys, values = normal(2, slots, shape.kv_heads, size)
    heads = normal(tokens, shape.heads + 2 * shape.kv_heads, size)
    norm = normal(shape.heads + shape.kv_heads, size) if shape.head_norm else None
    cos, sin = (
        table.to(x.device)[batch.positions_T].unsqueeze(1)
        for table in rope_tables(work.context, shape.rotated, 5e5, torch.float32)
    )

    rotary = QKRotary(norm, EPS, cos, sin)

    def rotate(kernels: Kernels) -> tuple[Tensor, ...]:
        pools = keys.clone(), values.clone()
        q = kernels.rotate_and_store(heads, rotary, *pools, batch.slots_T)
        return (q, *pools)

    def rotate_in_place(kernels: Kernels) -> tuple[Tensor, ...]:
        return (kernels.rotate_and_store(heads, rotary, keys, values, batch.slots_T),)

    moved = 2 * heads.numel() * item + 2 * cos.numel() * cos.element_size()
    yield Case("rotate_and_store", rotate, moved)
    yield Case("rotate_and_store in place", rotate_in_place, moved)

    q = normal(tokens, shape.heads, size)
    read = 2 * work.rows * work.context * shape.kv_heads * size * item
    yield Case(
        "paged_attention",
        lambda kernels: (kernels.paged_attention(q, keys, values, batch.windows),),
        read + 2 * q.numel() * item,
        4.0 * tokens * work.context * shape.heads * size,
        # It can only let all queries see all keys.
        rivals=(_varlen(shape, work, q, normal),) if shape.block % work.window == 0 else (),
    )


def _varlen(shape: Shape, work: Work, q_TQD: Tensor, normal: Normal) -> Rival:
    """Return torch's attention of packed sequences, given keys that lie side by side already."""
    keys, values = normal(2, work.rows * work.context, shape.kv_heads, shape.head_dim)
    number = torch.arange(work.rows + 1, dtype=torch.int32, device=q_TQD.device)
    queries = len(q_TQD) // work.rows
    ends = number * queries, number * work.context

    def run() -> object:
        # Importing it imports the compiler, which needs more than torch.
        from torch.nn.attention.varlen import varlen_attn

        known = signature(varlen_attn).parameters  # torch 2.11 needs no word for fewer key heads
        more: dict[str, Any] = {"enable_gqa": True} if "enable_gqa" in known else {}
        return varlen_attn(q_TQD, keys, values, *ends, queries, work.context, **more)

    return Rival("varlen_attn", run)


def _expert_cases(shape: Shape, work: Work, normal: Normal) -> Iterator[Case]:
    sparse = shape.sparse
    assert sparse is not None
    tokens, hidden, width = work.tokens, shape.hidden, sparse.width
    x = normal(tokens, hidden)
    # In float32, as routers compute: rounded ones tie, and sorts differ in what they do then.
    router = torch.randn(sparse.experts, hidden, device=x.device) * hidden**-0.5
    bias = torch.randn(sparse.experts, device=x.device) * 0.1
    moved = router.nbytes + x.nbytes + tokens * sparse.chosen * 12

    def route(kernels: Kernels) -> tuple[Tensor, ...]:
        if sparse.groups == 0:
            return kernels.softmax_router(x, router, None, sparse.chosen)[:2]
        found = kernels.grouped_sigmoid_router(
            x,
            router,
            bias,
            sparse.chosen,
            num_groups=sparse.groups,
            groups_chosen=sparse.groups_chosen,
            scale=2.5,
        )
        return found[:2]

    yield Case("router", route, moved, exact_ids=True)

    w13 = normal(sparse.experts, 2 * width, hidden, scale=hidden**-0.5)
    w2 = normal(sparse.experts, hidden, width, scale=width**-0.5)
    weights, ids = (
        torch.randn(tokens, sparse.experts, device=x.device).softmax(-1).topk(sparse.chosen)
    )
    matrices = 3 * hidden * width
    flops = 2.0 * tokens * sparse.chosen * matrices
    rows = 2 * tokens * hidden * x.element_size()
    yield Case(
        "experts_forward",
        lambda kernels: (kernels.experts_forward(x, w13, w2, ids, weights, None),),
        shape.distinct_experts(tokens) * matrices * x.element_size() + rows,
        flops,
    )
    residual, norm = normal(tokens, hidden), normal(hidden)
    yield Case(
        "experts_add_norm",
        lambda kernels: kernels.experts_add_norm(
            x, w13, None, w2, None, ids, weights, None, None, residual, norm, EPS
        ),
        shape.distinct_experts(tokens) * matrices * x.element_size() + 2 * rows,
        flops,
    )
    if x.device.type == "meta":
        kinds = {
            name: (w13.to(kind), w13.new_empty(w13.shape[:2]).float(), w2.to(kind), x.float()[0])
            for name, kind in (("int8", torch.int8), ("float8", torch.float8_e4m3fn))
        }
    else:
        kinds = {
            name: (*quantize_rows(w13, kind), *quantize_rows(w2, kind))
            for name, kind in (("int8", torch.int8), ("float8", torch.float8_e4m3fn))
        }
    for name, parts in kinds.items():
        yield Case(
            f"quantized_experts_forward {name}",
            lambda kernels, parts=parts: (  # type: ignore[misc]
                kernels.quantized_experts_forward(x, *parts, ids, weights, None),
            ),
            shape.distinct_experts(tokens) * matrices + rows,
            flops,
        )


def _head_cases(shape: Shape, work: Work, normal: Normal) -> Iterator[Case]:
    tokens, hidden = work.tokens, shape.hidden
    x = normal(tokens, hidden)
    head = normal(shape.vocab, hidden, scale=hidden**-0.5 * 4)
    gather = torch.full((tokens, 1), shape.vocab - 1, device=x.device)
    number = torch.arange(tokens, device=x.device)
    draw = Draw(torch.full_like(number, 1.0, dtype=torch.float32), number * 77, number, number)
    moved = head.numel() * x.element_size() + x.numel() * x.element_size()
    flops = 2.0 * tokens * head.numel()
    mask = shape.vocab - 1
    yield Case(
        "confidence",
        lambda kernels: kernels.confidence(x, head, 0, mask, gather, None),
        moved,
        flops,
        exact_ids=True,
    )
    yield Case(
        "confidence drawn",
        lambda kernels: kernels.confidence(x, head, 0, mask, gather, draw),
        moved,
        flops,
        exact_ids=True,
    )
    # Credit asks for the ids that it remembers, as many a row as a block is long; most are none.
    known = torch.randint(0, shape.vocab, (tokens, work.window), device=x.device)
    known = torch.cat([gather, known.masked_fill(number[: work.window] % 4 > 0, -1)], dim=1)
    yield Case(
        "confidence with credit",
        lambda kernels: kernels.confidence(x, head, 0, mask, known, None),
        moved,
        flops,
        exact_ids=True,
    )
