"""Requests that mix iterations, decoders and caches."""

from functools import cache

from diffray.components.params import SamplingParams
from diffray.workers.messages import Request
from tests.helpers.toy import ToyModel, prompt_of, run, toy_engine

BIDIRECTIONAL = ToyModel()
CAUSAL = ToyModel(block_causal=True)
SHIFTED = ToyModel(logit_shift=1)
DECODERS = [
    *("threshold", "fixed", "hierarchy", "credit", "factor", "edit", "schedule", "origin"),
    *("budget_threshold", "entropy_bound", "sequential", "lopa"),
]
SHIFTED_CAUSAL = ToyModel(block_causal=True, logit_shift=1)

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
