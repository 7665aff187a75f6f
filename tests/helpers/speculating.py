"""Requests of every policy that may speculate, each with and without speculation."""

import random
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from diffray.components.model_spec import ModelSpec
from diffray.components.params import SamplingParams
from diffray.workers.engine import Engine
from diffray.workers.messages import Request, Update
from tests.helpers.toy import prompt_of

KINDS: dict[str, dict[str, Any]] = {
    "bidirectional": {},
    "shifted": {"logit_shift": 1},
    "causal": {"block_causal": True},
    "shifted causal": {"logit_shift": 1, "block_causal": True},
}
_STEPPED: list[dict[str, Any]] = [
    {"kind": "fixed"},
    {"kind": "fixed", "remasking": "random"},
    {"kind": "origin"},
    {"kind": "budget_threshold", "threshold": 0.4},
]
_OTHERS: list[dict[str, Any]] = [
    {"kind": "threshold", "threshold": 0.6},
    {"kind": "threshold", "threshold": 0.5, "steps_per_block": 5},
    {"kind": "hierarchy"},
    {"kind": "factor"},
]
_OPTIONS: list[dict[str, Any]] = [
    {}, {"min_tokens": 5}, {"logit_bias": {3: 2.0}}, {"allowed_token_ids": range(20)},
]  # fmt: skip


def draw_requests(count: int, seed: int, spec: ModelSpec) -> list[Request]:
    """Return requests without speculation, the same for the same seed."""
    draws, causal = random.Random(seed), spec.block_causal
    found = []
    for uid in range(count):
        length = draws.randint(5, 60)
        steps = max(1, int(length * draws.choice((1, 1, 0.7, 0.4))))
        stepped = [part | {"steps": steps} for part in _STEPPED]
        cache: dict[str, Any] = {"kind": "none"}
        if draws.random() < 0.8:
            cache = {"kind": "exact" if causal else draws.choice(("dual", "prefix", "vicinity"))}
            if not causal and draws.random() < 0.3:
                cache["refresh"] = draws.randint(1, 5)
        diffusion: dict[str, Any] = {
            "decoder": draws.choice([*stepped, *_OTHERS]),
            "cache": cache,
            "block_length": draws.choice((4, 8, 16, 20, 32)),
        }
        if spec.logit_shift and not causal and draws.random() < 0.4:
            diffusion["iteration"] = {"kind": "first_token"}
        if causal and diffusion["decoder"]["kind"] in ("threshold", "hierarchy"):
            iteration = {"kind": "sub_blocks", "sub_block_length": draws.choice((2, 3, 8))}
            diffusion["iteration"] = draws.choice((iteration, {"kind": "block_diffusion"}))
        if draws.random() < 0.2:
            diffusion["zero_confidence_token_ids"] = [3, 4]
        params = SamplingParams(
            max_tokens=length, temperature=draws.choice((0, 0, 0.4, 1.2)),
            top_p=draws.choice((1, 1, 0.9)), top_k=draws.choice((0, 0, 12)),
            seed=draws.randrange(2**40), ignore_eos=draws.random() < 0.7, logprobs=True,
            diffusion=diffusion, **draws.choice(_OPTIONS),
        )  # fmt: skip
        found.append(Request(uid, prompt_of(draws.randint(1, 70), seed=uid), params))
    return found


def speculating(requests: Iterable[Request], drafts: int = 4) -> list[Request]:
    wanted = {"speculation": {"kind": "verify", "drafts": drafts}}
    found = []
    for request in requests:
        diffusion = request.params.diffusion.model_dump(exclude_unset=True) | wanted
        given = request.params.model_dump(exclude_unset=True) | {"diffusion": diffusion}
        found.append(replace(request, params=SamplingParams(**given)))
    return found


def run_all(engine: Engine, requests: Iterable[Request], steps: int = 1) -> list[Update]:
    """Run the requests to their end, and look that no copy is left."""
    for request in requests:
        engine.add(request)
    found: list[Update] = []
    while not engine.idle:
        found += engine.step(steps)
    assert not engine.copies.holders and engine.slots.num_free == engine.slots.num_slots
    return found


def texts(updates: Iterable[Update]) -> dict[int, list[tuple[int, int]]]:
    """Return each request's tokens, with the steps at which they became final."""
    found: dict[int, list[tuple[int, int]]] = {}
    for update in updates:
        found.setdefault(update.uid, []).extend(zip(update.ids, update.steps, strict=True))
    return found
