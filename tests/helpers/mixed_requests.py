"""Requests that mix iterations, decoders and caches; and the same with one thing more."""

import random
from collections.abc import Sequence as Items
from dataclasses import replace
from functools import cache
from typing import Any, get_args

import pytest

from diffray.components.grammar.automaton import Automaton
from diffray.components.grammar.template import Template
from diffray.components.params import SamplingParams
from diffray.components.policy import AnyDecoder
from diffray.workers.messages import Request
from tests.helpers.random_canvases import random_canvas
from tests.helpers.random_grammars import random_automaton
from tests.helpers.toy import EOS, MASK, VOCAB, ToyModel, prompt_of, run, toy_engine

BIDIRECTIONAL = ToyModel()
CAUSAL = ToyModel(block_causal=True)
SHIFTED = ToyModel(logit_shift=1)
DECODERS = [
    kind.model_fields["kind"].default
    for kind in get_args(get_args(AnyDecoder)[0])
    if not kind.whole_slots  # of pinned canvases alone
]
SHIFTED_CAUSAL = ToyModel(block_causal=True, logit_shift=1)
IN_PIECES = ToyModel()  # or bidirectional
IN_PIECES.spec = replace(IN_PIECES.spec, own_iterations=("block_diffusion", "blockwise"))

MIXED: list[dict[str, object]] = [
    {"decoder": {"kind": "threshold", "threshold": 0.6}, "cache": {"kind": "dual"}},
    {"decoder": {"kind": "credit"}, "cache": {"kind": "none"}, "block_length": 16},
    {
        "decoder": {"kind": "hierarchy"},
        "cache": {"kind": "vicinity", "before": 4, "after": 9, "warmup": 3},
        "iteration": {"kind": "soft"},
        "block_length": 20,
    },
    {
        "decoder": {"kind": "fixed", "steps": 17},
        "cache": {"kind": "prefix"},
        "block_length": 8,
        "zero_confidence_token_ids": [3, 40],
    },
    {"decoder": {"kind": "factor"}, "cache": {"kind": "dual", "refresh": 3}, "cfg_scale": 0.7},
    {"decoder": {"kind": "edit", "threshold": 0.3, "edit_threshold": 0.2}, "block_length": 12},
    {"decoder": {"kind": "schedule", "steps": 21}, "block_length": 16},
    {
        "decoder": {"kind": "schedule", "steps": 30, "order": "margin"},
        "iteration": {"kind": "first_token"},
        "block_length": 16,
    },
    {"decoder": {"kind": "origin", "steps": 24}, "cache": {"kind": "none"}},
    {"decoder": {"kind": "budget_threshold", "steps": 20, "threshold": 0.4}, "block_length": 24},
    {"decoder": {"kind": "entropy_bound", "gamma": 0.5}, "cfg_scale": 0.4},
]
MIXED_CAUSAL: list[dict[str, object]] = [
    {"decoder": {"kind": "threshold", "threshold": 0.6, "steps_per_block": 5}},
    {"decoder": {"kind": "credit"}, "block_length": 16},
    {"decoder": {"kind": "hierarchy"}, "iteration": {"kind": "soft"}, "block_length": 20},
    {"decoder": {"kind": "fixed", "steps": 17}, "cache": {"kind": "none"}, "block_length": 8},
    {"decoder": {"kind": "factor"}, "cfg_scale": 0.7},
    {"decoder": {"kind": "edit", "threshold": 0.3, "edit_threshold": 0.2}, "block_length": 12},
    {"decoder": {"kind": "sequential", "steps_per_block": 3}, "block_length": 4},
    {
        "decoder": {"kind": "threshold", "threshold": 0.3},
        "iteration": {"kind": "sub_blocks", "sub_block_length": 4},
        "block_length": 16,
    },
    {
        "decoder": {"kind": "edit", "preset": "quality", "steps_per_block": 9},
        "iteration": {"kind": "sub_blocks", "sub_block_length": 5},
        "cache": {"kind": "none"},
        "block_length": 12,
    },
]
SUB_BLOCK: list[dict[str, object]] = [
    *MIXED_CAUSAL[:3],
    *(
        {
            "decoder": {"kind": kind},
            "iteration": {"kind": "sub_blocks", "sub_block_length": length},
            "cache": {"kind": "sub_block"},
            "block_length": 16,
        }
        for kind, length in (("threshold", 4), ("credit", 6), ("edit", 8), ("hierarchy", 5))
    ),
]


Policies = list[dict[str, object]]
_BOTH = [
    pytest.param(BIDIRECTIONAL, MIXED, id="bi"),
    pytest.param(CAUSAL, MIXED_CAUSAL, id="causal"),
]
BOTH = pytest.mark.parametrize(("model", "policies"), _BOTH)
ALL_THREE = pytest.mark.parametrize(
    ("model", "policies"), [*_BOTH, pytest.param(SHIFTED, MIXED, id="shifted")]
)


# Final tokens are encoded in pieces.
PIECES: list[dict[str, object]] = [
    *(policy for policy in MIXED_CAUSAL if "iteration" not in policy),
    {
        "decoder": {"kind": "fixed", "steps": 17, "rounding": "half_even"},
        "block_length": 8,
        "canvas": "fixed",
    },
    {"decoder": {"kind": "threshold", "threshold": 0.6}, "iteration": {"kind": "blockwise"}},
]


def mixed_requests(policies: list[dict[str, object]]) -> list[Request]:
    """Ragged prompts with different policies, temperatures, filters and seeds."""
    return [
        Request(
            uid,
            prompt_of(7 + 11 * uid, seed=uid),
            SamplingParams(
                max_tokens=20 + 4 * uid,
                temperature=(0, 0.8, 1.3)[uid % 3],
                top_p=(1, 0.9)[uid % 2],
                top_k=(0, 0, 12)[uid % 3],
                seed=100 + uid,
                ignore_eos=True,
                diffusion=policy,
            ),
        )
        for uid, policy in enumerate(policies)
    ]


@cache
def alone(model: ToyModel) -> dict[int, list[int]]:
    """Return what each request of the model's mixture writes in an engine of its own."""
    requests = mixed_requests(MIXED_CAUSAL if model.spec.block_causal else MIXED)
    return {each.uid: run(toy_engine(model), [each])[each.uid] for each in requests}


PENALTIES: list[dict[str, Any]] = [
    {"presence_penalty": 1.5},
    {"frequency_penalty": 0.7},
    {"repetition_penalty": 1.7},
    {"presence_penalty": -0.5, "frequency_penalty": 0.4, "repetition_penalty": 0.8},
    {"presence_penalty": 0.3, "frequency_penalty": -0.2, "repetition_penalty": 1.3},
]


def penalized_requests(policies: list[dict[str, object]]) -> list[Request]:
    found = []
    for request in mixed_requests(policies):
        own = PENALTIES[request.uid % 5] if request.uid % 3 else {}
        update = own | {"min_p": (0, 0.1)[request.uid % 2]}
        found.append(replace(request, params=request.params.model_copy(update=update)))
    return found


def infill_requests(policies: list[dict[str, object]]) -> list[Request]:
    plain = mixed_requests(policies)
    return [replace(each, suffix=prompt_of(5 * each.uid, seed=50 + each.uid)) for each in plain]


@cache
def grammar(number: int) -> tuple[Automaton, bytes]:
    found = random_automaton(random.Random(number), VOCAB, (EOS,))
    return found, found.to_bytes()


def guided_requests(policies: list[dict[str, object]], seed: int) -> list[Request]:
    """Return the mixture with an automaton each, with just enough tokens or with more."""
    found = []
    for request in mixed_requests(policies):
        automaton, data = grammar(100 * seed + request.uid)
        most = automaton.shortest + (0, 3, 40)[(request.uid + seed) % 3]
        update = {"max_tokens": max(most, 1), "ignore_eos": False}
        params = request.params.model_copy(update=update)
        found.append(replace(request, params=params, grammar=data))
    return found


def sequences_of(ids: Items[int]) -> tuple[tuple[int, ...], ...]:
    """Return some of what an answer has, of two and of three tokens."""
    pairs = [tuple(ids[at : at + 2]) for at in range(0, len(ids) - 2, 5)]
    return (*pairs, *(tuple(ids[at : at + 3]) for at in range(2, len(ids) - 3, 7)))


def careful_requests(model: ToyModel) -> list[Request]:
    found = []
    for request in mixed_requests(MIXED_CAUSAL if model.spec.block_causal else MIXED):
        update = {"bad_token_sequences": sequences_of(alone(model)[request.uid])}
        found.append(replace(request, params=request.params.model_copy(update=update)))
    return found


@cache
def canvas_of(number: int) -> bytes:
    return random_canvas(random.Random(number), VOCAB, MASK, EOS).to_bytes()


def pinned(request: Request, number: int, **diffusion: object) -> Request:
    """Return the request with a canvas in place of its length."""
    own = request.params.diffusion.model_dump(exclude_unset=True) | {"canvas": "pinned"}
    given = request.params.model_dump(exclude={"diffusion"}) | {"ignore_eos": False}
    data = canvas_of(number)
    given |= {"max_tokens": len(Template.from_bytes(data).cells), "diffusion": own | diffusion}
    return replace(request, params=SamplingParams(**given), grammar=data)


def pinned_requests(policies: list[dict[str, object]], seed: int) -> list[Request]:
    """Return the mixture as far as canvases may shrink in it, some with the canvas as one block."""
    refused = {"soft", "first_token", "sub_blocks", "edit"}
    found = []
    for request in mixed_requests(policies):
        parts = request.params.diffusion.model_dump()
        kinds = {part["kind"] for part in (parts["iteration"], parts["decoder"]) if part}
        if not kinds & refused:
            whole = {"block_length": None} if (request.uid + seed) % 2 else {}
            found.append(pinned(request, 100 * seed + request.uid, **whole))
    return found
