"""Each kernel, with the inputs that it gets in a model's step.

Letters: T packed tokens, R rows of the head, E experts, K experts of a token.
"""

from collections.abc import Callable, Iterator
from collections.abc import Sequence as Items
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import linear

from benchmarks.gpu.shapes import ALL, Shape, Sparse, Work
from diffray.components.batch import Batch, Window
from diffray.kernels.acceptance import LONGEST, Settling
from diffray.kernels.attention import KVLayer, QKRotary
from diffray.kernels.choose import Kernels
from diffray.kernels.confidence import Confidence, Draw
from diffray.kernels.credit import Rewarding
from diffray.kernels.experts import ExpertWeights
from diffray.kernels.formats import FORMATS, KV_FORMATS, Format
from diffray.kernels.quantize import quantize
from diffray.kernels.quantized_kv import QuantizedKV, round_heads, widen_heads
from diffray.kernels.rope import rope_tables
from diffray.kernels.rope_scaling import Rope
from diffray.kernels.router import Routing

EPS = 1e-5
EXPERT_FORMATS = {"": None, " int8": "int8", " float8": "fp8", " float8 rows": "w8a8_fp8"}
PAGE_SIZE = 16  # the engine's

Normal = Callable[..., Tensor]


@dataclass(frozen=True, slots=True)
class Case:
    """A kernel's call: `run` returns all that it computes, also what it stores in place."""

    kernel: str
    run: Callable[[Kernels], tuple[Tensor, ...]]
    exact_ids: bool = False  # the first output has integers that rounding may change
    # Rounds to float8 in between: an input's last bit may decide, in float32 as in bfloat16.
    rounds: bool = False


class Which(NamedTuple):
    """A kernel of a model at a size, from which `case` makes its case."""

    shape: str
    work: Work
    dtype: torch.dtype
    kernel: str

    @property
    def columns(self) -> dict[str, Any]:
        """These fields as columns of a report."""
        dtype = str(self.dtype).removeprefix("torch.")
        return {"shape": self.shape, **self.work._asdict(), "dtype": dtype, "kernel": self.kernel}

    def __str__(self) -> str:
        return f"{self.kernel}, {self.shape} {self.work} {self.columns['dtype']}"

    def case(self, device: torch.device) -> Case:
        """Make the case on the device, with the same inputs each time."""
        torch.manual_seed(self.work.tokens)
        every = cases(ALL[self.shape], self.work, self.dtype, device)
        return next(case for case in every if case.kernel == self.kernel)


def listed(shapes: Items[str], works: Items[Work], dtypes: Items[torch.dtype]) -> Iterator[Which]:
    """Yield every kernel of these models at these sizes, without making inputs."""
    for shape in shapes:
        names = [case.kernel for case in cases(ALL[shape], works[0], dtypes[0], "meta")]
        for work, dtype, name in product(works, dtypes, names):
            yield Which(shape, work, dtype, name)


def cases(
    shape: Shape, work: Work, dtype: torch.dtype, device: torch.device | str
) -> Iterator[Case]:
    """Yield the kernels' calls of one layer and of the head, one after the other."""

    def normal(*size: int, scale: float = 1.0) -> Tensor:
        return torch.randn(size, device=device, dtype=dtype) * scale

    yield from _layer_cases(shape, work, normal)
    if shape.sparse is not None:
        yield from _expert_cases(shape, shape.sparse, work, normal)
    yield from _head_cases(shape, work, normal)


def last_windows(shape: Shape, work: Work, device: torch.device) -> tuple[Batch, int]:
    """Return windows at the ends of sequences with shuffled pages, and the pool's page count.

    A window is the whole context if that is shorter.
    """
    pages_RP = torch.randperm(work.rows * -(-work.context // PAGE_SIZE)) + 1
    span = work.context - min(work.window, work.context), work.context, work.context, shape.block
    windows = [Window(*span, pages_P) for pages_P in pages_RP.view(work.rows, -1)]
    return Batch.pack(windows, device, PAGE_SIZE), pages_RP.numel() + 1


def _layer_cases(shape: Shape, work: Work, normal: Normal) -> Iterator[Case]:
    tokens, hidden, size = work.tokens, shape.hidden, shape.head_dim
    x, residual, weight = normal(tokens, hidden), normal(tokens, hidden), normal(hidden)
    yield Case("add_norm", lambda kernels: kernels.add_norm(x, residual, weight, EPS))
    inputs = shape.heads * size
    seen, out = normal(tokens, inputs), normal(hidden, inputs, scale=inputs**-0.5)
    yield Case(
        "linear_add_norm",
        lambda kernels: kernels.linear_add_norm(seen, out, residual, weight, EPS),
    )
    for name, kind in (("int8", "int8"), ("float8", "fp8"), ("float8 rows", "w8a8_fp8")):
        kept = quantize(out, FORMATS[kind])
        yield Case(
            f"quantized_linear {name}",
            lambda kernels, kept=kept: (kernels.quantized_linear(seen, kept, None),),  # type: ignore[misc]
        )
    yield Case("rms_norm", lambda kernels: (kernels.rms_norm(x, weight, EPS),))

    batch, num_pages = last_windows(shape, work, x.device)
    keys, values = normal(2, num_pages * PAGE_SIZE, shape.kv_heads, size)
    heads = normal(tokens, shape.heads + 2 * shape.kv_heads, size)
    norm = normal(shape.heads + shape.kv_heads, size) if shape.head_norm else None
    cos, sin = (
        table.to(x.device)[batch.positions_T].unsqueeze(1)
        for table in rope_tables(Rope(5e5, work.context), shape.rotated, torch.float32)
    )
    rotary = QKRotary(norm, EPS, cos, sin)

    def rotate(kernels: Kernels) -> tuple[Tensor, ...]:
        pools = keys.clone(), values.clone()
        q = kernels.rotate_and_store(heads, rotary, *pools, batch.slots_T)
        return (q, *pools)

    def attend(kernels: Kernels) -> tuple[Tensor, ...]:
        pools = KVLayer(*(pool.clone() for pool in (keys, values)))
        return (kernels.attend(heads, rotary, pools, batch.slots_T, batch.windows), *pools)

    def quantized_attend(kernels: Kernels, form: Format) -> tuple[Tensor, ...]:
        pools = QuantizedKV(form, round_heads(keys, form), round_heads(values, form))
        read = kernels.quantized_attend(heads, rotary, pools, batch.slots_T, batch.windows)
        return read, *(widen_heads(kept, form, read.dtype) for kept in pools[1:])

    yield Case("attend", attend)
    for name, form in KV_FORMATS.items():
        if size % max(form.group, 1) == 0:
            run = partial(quantized_attend, form=form)
            yield Case(f"quantized_attend {name}", run, rounds=True)
    yield Case("rotate_and_store", rotate)
    q = normal(tokens, shape.heads, size)
    yield Case(
        "paged_attention",
        lambda kernels: (kernels.paged_attention(q, keys, values, batch.windows.paged),),
    )


def _expert_cases(shape: Shape, sparse: Sparse, work: Work, normal: Normal) -> Iterator[Case]:
    tokens, hidden, width = work.tokens, shape.hidden, sparse.width
    x = normal(tokens, hidden)
    # In float32, as routers compute: rounded scores tie, and sorts differ in how they break ties.
    router = torch.randn(sparse.experts, hidden, device=x.device) * hidden**-0.5
    bias = torch.randn(sparse.experts, device=x.device) * 0.1
    groups = {"num_groups": sparse.groups, "groups_chosen": sparse.groups_chosen, "scale": 2.5}

    def route(kernels: Kernels) -> tuple[Tensor, ...]:
        if sparse.groups == 0:
            return kernels.softmax_router(x, router, None, sparse.chosen)[:2]
        return kernels.grouped_sigmoid_router(x, router, bias, sparse.chosen, **groups)[:2]

    yield Case("router", route, exact_ids=True)
    w31 = normal(sparse.experts, 2 * width, hidden, scale=hidden**-0.5)
    w2 = normal(sparse.experts, hidden, width, scale=width**-0.5)
    weights, ids = linear(x.float(), router).softmax(-1).topk(sparse.chosen)
    routing = Routing(ids, weights)
    residual, norm = normal(tokens, hidden), normal(hidden)

    def alone(experts: ExpertWeights, kernels: Kernels) -> tuple[Tensor, ...]:
        return (kernels.experts(x, experts, routing),)

    def normed(experts: ExpertWeights, kernels: Kernels) -> tuple[Tensor, ...]:
        return kernels.experts_add_norm(x, experts, routing, None, residual, norm, EPS)

    for name, kind in EXPERT_FORMATS.items():
        one, two = (w if kind is None else quantize(w, FORMATS[kind]) for w in (w31, w2))
        experts = ExpertWeights(one, two)
        rounds = experts.rounds_inputs
        yield Case(f"experts{name}", partial(alone, experts), rounds=rounds)
        yield Case(f"experts_add_norm{name}", partial(normed, experts), rounds=rounds)


def _head_cases(shape: Shape, work: Work, normal: Normal) -> Iterator[Case]:
    tokens, hidden = work.tokens, shape.hidden
    x, head = normal(tokens, hidden), normal(shape.vocab, hidden, scale=hidden**-0.5 * 4)
    gather = torch.full((tokens, 1), shape.vocab - 1, device=x.device)
    number = torch.arange(tokens, device=x.device)
    draw = Draw(torch.full_like(number, 1.0, dtype=torch.float32), number * 77, number, number)
    # Credit also asks for the ids that it remembers: per row a block's length, most of them empty.
    place = Rewarding.made_up(work.rows, work.window, shape.vocab, x.device)
    known = torch.cat([gather, place.credits.known(place.cells_R)], dim=1)
    for name, asked, drawn in (
        ("confidence", gather, None),
        ("confidence drawn", gather, draw),
        ("confidence with credit", known, None),
    ):
        yield Case(
            name,
            lambda kernels, asked=asked, drawn=drawn: kernels.confidence(  # type: ignore[misc]
                x, head, 0, shape.vocab - 1, asked, drawn
            ),
            exact_ids=True,
        )
    yield _reward_case(shape, work, known, normal)
    yield _settle_case(work, normal)


def _reward_case(shape: Shape, work: Work, known: Tensor, normal: Normal) -> Case:
    """Return credit's case, for tokens whose logits are close to each other."""
    gathered = normal(*known.shape).float()
    ids = torch.arange(len(known), device=known.device) % (shape.vocab - 1)
    best = gathered.amax(1)
    found = Confidence(ids, best, best, best, best + 2, gathered - 0.5)

    def reward(kernels: Kernels) -> tuple[Tensor, ...]:
        place = Rewarding.made_up(work.rows, work.window, shape.vocab, known.device)
        memory = place.credits.memory
        return (*kernels.reward(found, *place), *(part.flatten(0, 1) for part in memory))

    return Case("reward", reward, exact_ids=True)


def _settle_case(work: Work, normal: Normal) -> Case:
    """Return the case of a step's end, with confidences of all sizes."""
    window = min(work.window, LONGEST)
    logits = -normal(work.rows * window).float().abs()
    ids, zeros = torch.arange(len(logits), device=logits.device) * 7, torch.zeros_like(logits)
    found = Confidence(ids, logits, logits, logits, zeros, (logits - 1).unsqueeze(1))

    def settle(kernels: Kernels) -> tuple[Tensor, ...]:
        place = Settling.made_up(work.rows, window, logits.device)
        kernels.settle(found, *place)
        return (*place.progress[:6], place.ids_N, place.masked_N)

    return Case("settle", settle)
