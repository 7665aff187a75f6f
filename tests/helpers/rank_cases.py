"""What ranks are asked to do in tests/workers/test_ranks.py: one mixed batch for each model.

The functions are importable by name, because processes that are started anew must find them.
"""

import random
from collections.abc import Iterator
from collections.abc import Sequence as Items
from copy import deepcopy
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from diffray.components.lora import LoRA
from diffray.components.mesh import Mesh
from diffray.components.model_spec import ModelSpec
from diffray.components.params import SamplingParams
from diffray.kernels.checksum import checksum
from diffray.workers.engine import Engine
from diffray.workers.engine_options import EngineOptions
from diffray.workers.messages import Change, Request, Round, Update
from diffray.workers.setup import build_engine
from tests.helpers.random_canvases import random_canvas
from tests.helpers.random_grammars import random_automaton
from tests.helpers.speculating import texts
from tests.helpers.tiny_checkpoints import full_forward

BIDIRECTIONAL: list[dict[str, Any]] = [
    {"decoder": {"kind": "threshold", "threshold": 0.2}, "cache": {"kind": "dual"}},
    {"decoder": {"kind": "credit", "threshold": 0.2}, "cache": {"kind": "none"}},
    {
        "decoder": {"kind": "hierarchy", "threshold": 0.3, "low_threshold": 0.05},
        "cache": {"kind": "vicinity", "before": 3, "after": 4, "warmup": 2},
        "iteration": {"kind": "soft"},
    },
    {
        "decoder": {"kind": "fixed", "steps": 2},
        "cache": {"kind": "prefix"},
        "zero_confidence_token_ids": [3, 20, 40, 60],  # of both ranks' vocabularies
    },
    {"decoder": {"kind": "factor"}, "cache": {"kind": "dual", "refresh": 3}, "cfg_scale": 0.7},
    {"decoder": {"kind": "edit", "threshold": 0.1, "edit_threshold": 0.2}},
    {"decoder": {"kind": "schedule", "steps": 5}, "iteration": {"kind": "first_token"}},
    {"decoder": {"kind": "entropy_bound", "gamma": 2.0}},
    {"decoder": {"kind": "sequential"}},
]
BLOCK_CAUSAL: list[dict[str, Any]] = [
    {
        "decoder": {"kind": "threshold", "threshold": 0.2},
        "iteration": {"kind": "sub_blocks", "sub_block_length": 4},
        "cache": {"kind": "sub_block"},
    },
    {"decoder": {"kind": "credit", "threshold": 0.2}},
    {
        "decoder": {"kind": "hierarchy", "threshold": 0.3, "low_threshold": 0.05},
        "iteration": {"kind": "soft"},
    },
    {"decoder": {"kind": "fixed", "steps": 2}, "cache": {"kind": "none"}},
    {"decoder": {"kind": "factor"}, "cfg_scale": 0.7},
    {"decoder": {"kind": "edit", "threshold": 0.1, "edit_threshold": 0.2}},
    {"decoder": {"kind": "schedule", "steps": 5, "order": "margin"}},
    {"decoder": {"kind": "entropy_bound", "gamma": 2.0}},
    {"decoder": {"kind": "sequential", "steps_per_block": 3}, "block_length": 4},
]
PROMPTS = [5, 9, 13, 16, 21, 26, 8, 11, 7]
# Greedy and seeded, filtered and not.
SAMPLING: list[dict[str, Any]] = [
    {"max_tokens": 9},
    {"max_tokens": 9, "temperature": 0.8, "logit_bias": {3: 2.0}, "bad_token_ids": range(20, 40)},
    {"max_tokens": 8, "temperature": 1.2, "logprobs": True, "top_logprobs": 20},
    {"max_tokens": 4, "temperature": 0.9, "top_k": 9, "top_p": 0.8},
    {"max_tokens": 7, "temperature": 0.7, "min_tokens": 4},
    {"max_tokens": 6, "presence_penalty": 0.8, "repetition_penalty": 1.5},
    {"max_tokens": 9, "top_p": 0.7, "frequency_penalty": 1.0},
    {"max_tokens": 8, "temperature": 0.5, "top_k": 20, "min_p": 0.2},
    {"max_tokens": 9, "temperature": 0.6, "allowed_token_ids": [1, 17, 33, 34, 58, 60]},
]

_AVOIDED = [[token, token] for token in range(20)]
# With structured outputs, or with words that must not be written, or with both.
GUIDED: list[dict[str, Any]] = [
    {},
    {"temperature": 0.8, "top_p": 0.7},
    {"temperature": 1.2, "bad_token_sequences": _AVOIDED},
    {"bad_token_sequences": _AVOIDED},
]


class Case(NamedTuple):
    model: str
    expert_parallel: bool
    dtype: str = "float64"
    kv_cache_dtype: str = "auto"


@dataclass(frozen=True)
class Found:
    logits_TV: Tensor  # its slice of the vocabulary
    tokens: dict[int, list[int]]  # by request
    steps: dict[int, list[int]]
    logprobs: dict[int, list[float]]  # of the tokens and of the most probable ones
    cached: int = 0  # tokens of prompts that were there


def engine_of(mesh: Mesh, model: str, **options: Any) -> Engine:
    ids = {"mask_token_id": 510, "eos_token_id": 511} if "golden" in model else {}
    given = {"dtype": "float64", "device": "cpu", "max_model_len": 64} | ids | options
    return build_engine(model, EngineOptions.model_validate(given), mesh)


def updates_of(
    mesh: Mesh, engine: Engine, requests: Items[Request], steps: int = 1
) -> Iterator[Update]:
    """Run requests; after every round the canvases of all ranks must be equal."""
    for request in requests:
        engine.add(request)
    while not engine.idle:
        yield from engine.step(steps)
        assert mesh.all_equal(checksum(engine.slots.ids_SN, engine.slots.masked_SN))


def run_cases(mesh: Mesh, cases: Items[Case]) -> tuple[list[Found], int]:
    """Do all cases as one of the ranks; return also how many K/V pages the ranks agreed on."""
    found = [run_case(mesh, case) for case in cases]
    memory = (1 + mesh.rank) << 20
    engine = engine_of(mesh, "demo", dtype="float32", max_model_len=None, kv_cache_memory=memory)
    return found, engine.kv.num_pages


def run_case(mesh: Mesh, case: Case) -> Found:
    mesh = replace(mesh, expert_parallel=case.expert_parallel)
    options = {"dtype": case.dtype, "kv_cache_dtype": case.kv_cache_dtype}
    engine = engine_of(mesh, case.model, max_num_seqs=8, page_size=8, **options)
    spec = engine.model.spec
    logits_TV = full_forward(engine.model, list(range(20, 32)), 4 if spec.block_causal else 0)
    requests = [*requests_for(spec), *guided_requests(spec, engine.eos_token_ids)]
    none: dict[int, list[Any]] = {request.uid: [] for request in requests}
    found = Found(logits_TV, deepcopy(none), deepcopy(none), deepcopy(none))
    for update in updates_of(mesh, engine, requests, 2):
        found.tokens[update.uid] += update.ids
        found.steps[update.uid] += update.steps
        found.logprobs[update.uid] += update.logprobs
        for top in update.top_logprobs:
            found.logprobs[update.uid] += [value for _, value in top]
        if update.finish_reason:
            found = replace(found, cached=found.cached + update.cached_tokens)
    return found


class Pinned(NamedTuple):
    tokens: dict[int, list[int]]  # by request
    fields: dict[int, dict[str, tuple[float, dict[str, float]]]]


def run_pinned(mesh: Mesh, model: str) -> Pinned:
    """Fill random canvases, greedily and not, with guidance and without."""
    engine = engine_of(mesh, model, max_num_seqs=8, max_model_len=256, page_size=8)
    size, mask_id = engine.model.spec.vocab_size, engine.slots.mask_token_id
    requests = []
    for uid in range(8):
        canvas = random_canvas(random.Random(uid), size, mask_id, engine.eos_token_ids[0])
        params = SamplingParams(
            max_tokens=200, seed=uid, temperature=uid % 2, logprobs=True,
            diffusion={"canvas": "pinned", "cfg_scale": (0, 0.7)[uid % 3 == 2]},
        )  # fmt: skip
        prompt = tuple(range(20, 40 + uid))
        requests.append(Request(uid, prompt, params, grammar=canvas.to_bytes()))
    updates = [*updates_of(mesh, engine, requests)]
    return Pinned({each.uid: each.ids for each in updates}, {u.uid: u.fields for u in updates})


class Drafted(NamedTuple):
    tokens: dict[int, list[tuple[int, int]]]  # by request, with their steps
    forwards: int


def run_drafted(mesh: Mesh, model: str, *, speculation: bool = True) -> Drafted:
    """Answer with `fixed` and `threshold`, greedily and not, and `factor` beside them."""
    engine = engine_of(mesh, model, max_model_len=128, page_size=8, draft_overhead=10_000)
    verify: dict[str, Any] = {"speculation": {"kind": "verify", "drafts": 3}} if speculation else {}
    fixed = {"decoder": {"kind": "fixed", "steps": 24}} | verify
    factor = {"decoder": "factor"}
    policies = [fixed, factor, fixed, {"decoder": {"kind": "threshold", "threshold": 0.3}} | verify]
    requests = []
    for uid, policy in enumerate(policies):
        params = SamplingParams(
            max_tokens=24,
            seed=uid,
            temperature=(0, 0, 0.4, 0)[uid],
            ignore_eos=True,
            diffusion={"block_length": 8} | policy,
        )
        requests.append(Request(uid, tuple(range(20, 31 + uid)), params))
    return Drafted(texts(updates_of(mesh, engine, requests)), engine.forwards)


def requests_for(spec: ModelSpec) -> list[Request]:
    """Return ragged prompts, each with another policy; where K/V can be shared they begin alike."""
    draw = torch.Generator().manual_seed(5)
    policies = BLOCK_CAUSAL if spec.block_causal else BIDIRECTIONAL
    ids = torch.randint(0, 60, (sum(PROMPTS),), generator=draw).tolist()
    before = [sum(PROMPTS[:n]) for n in range(len(PROMPTS))]
    first = [0] * len(PROMPTS) if spec.block_causal else before
    return [
        Request(
            uid,
            tuple(ids[first[uid] : first[uid] + PROMPTS[uid]]),
            SamplingParams(
                seed=100 + uid,
                ignore_eos=uid != 4,
                diffusion={"block_length": 8} | policy,
                **sampling,
            ),
        )
        for uid, (policy, sampling) in enumerate(zip(policies, SAMPLING, strict=True))
    ]


def guided_requests(spec: ModelSpec, end_ids: Items[int]) -> list[Request]:
    """Return requests with random automata, which share no K/V with others."""
    draw, found = random.Random(6), []
    policies = (BLOCK_CAUSAL if spec.block_causal else BIDIRECTIONAL)[: len(GUIDED)]
    for uid, (policy, sampling) in enumerate(zip(policies, GUIDED, strict=True), len(PROMPTS)):
        automaton = random_automaton(draw, spec.vocab_size, end_ids)
        most = automaton.shortest + draw.choice((2, 9))
        params = SamplingParams(
            seed=uid, max_tokens=most, diffusion={"block_length": 8} | policy, **sampling
        )
        grammar = b"" if uid == len(PROMPTS) + len(GUIDED) - 1 else automaton.to_bytes()
        prompt = tuple(draw.randrange(60) for _ in range(7))
        found.append(Request(uid, prompt, params, grammar=grammar))
    return found


class Updated(NamedTuple):
    """What one rank has to say of updates: refusals, and tokens after each."""

    refusals: list[str]
    tokens: list[list[int]]


def run_updates(mesh: Mesh, first: str, folders: Items[str]) -> Updated:
    """Load a checkpoint, replace its weights by those of each folder, and answer after each."""
    engine = engine_of(mesh, first, max_num_seqs=2)
    found = Updated([], [])
    for number, folder in enumerate(folders, 1):
        change = Change(number, str(number), folder)
        request = Request(number, tuple(range(9)), SamplingParams(max_tokens=12, ignore_eos=True))
        order = Round(number, [], [request.to_wire()], 1, change=change)
        reply = engine.run(order, lambda wire: engine.check(wire.to_request()))
        found.refusals.append(reply.unchanged)
        found.tokens.append([token for update in reply.updates for token in update.ids])
        while not engine.idle:
            found.tokens[-1] += [token for update in engine.step() for token in update.ids]
    return found


class Adapted(NamedTuple):
    """What one rank has to say of adapters: refusals, and the tokens of each request."""

    refused: list[str]
    tokens: dict[int, list[int]]


def run_adapted(
    mesh: Mesh, folder: str, adapters: Items[LoRA], expert_parallel: bool = False
) -> Adapted:
    """Answer with each adapter and with none; the last one's folder is found on rank 0 alone."""
    mesh = replace(mesh, expert_parallel=expert_parallel)
    engine = engine_of(mesh, folder, max_loras=2, mask_token_id=62, eos_token_id=63)
    last = adapters[-1]._replace(name="gone", number=99)
    if mesh.rank > 0:
        last = last._replace(path="nowhere")
    wishes = [None, *adapters, None, last]
    requests = [
        Request(uid, (5, 9, 30 + uid), SamplingParams(max_tokens=12, ignore_eos=True), lora=lora)
        for uid, lora in enumerate(wishes)
    ]
    found = Adapted([], {uid: [] for uid in range(len(wishes))})
    order = Round(1, [], [request.to_wire() for request in requests], 1)
    reply = engine.run(order, lambda wire: engine.check(wire.to_request()))
    found.refused.extend(reason for _, reason in reply.refused)
    updates = reply.updates
    while updates or not engine.idle:
        for update in updates:
            found.tokens[update.uid] += update.ids
        updates = engine.step()
    return found
