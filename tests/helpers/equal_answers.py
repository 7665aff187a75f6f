"""How many answers have the same tokens in a batch, or over ranks, as alone on one rank.

    python -m tests.helpers.equal_answers --dtype float32
    python -m tests.helpers.equal_answers --dtype float32 --ranks 2

The models are the golden checkpoints. Their weights are random, so close calls are far more
frequent than with trained ones. Half of the requests sample at a temperature; decoders, caches and
iterations are mixed. Ranks are processes of this machine over gloo.
"""

import argparse
import random
from collections.abc import Sequence
from functools import partial

from benchmarks.golden import EOS, MASK, MASKED
from diffray.components.mesh import Mesh
from diffray.components.params import SamplingParams
from diffray.workers.engine_options import EngineOptions
from diffray.workers.messages import Request
from diffray.workers.setup import build_rank
from tests.helpers import toy
from tests.helpers.paths import GOLDEN
from tests.helpers.ranks import on_ranks

_DECODERS: list[dict[str, object]] = [
    {"kind": "threshold", "threshold": 0.3},
    {"kind": "fixed", "steps": 12},
    {"kind": "hierarchy", "threshold": 0.4, "low_threshold": 0.1},
    {"kind": "credit", "threshold": 0.3},
    {"kind": "factor"},
    {"kind": "edit", "threshold": 0.3, "edit_threshold": 0.3},
    {"kind": "threshold", "threshold": 0.3, "steps_per_block": 5},
    {"kind": "sequential"},
    {"kind": "sequential", "steps_per_block": 3},
    {"kind": "schedule", "steps": 12},
    {"kind": "origin", "steps": 12},
    {"kind": "budget_threshold", "threshold": 0.3, "steps": 12},
    {"kind": "entropy_bound", "gamma": 2.0},
]
_WITH_THRESHOLD = "threshold", "hierarchy", "credit", "edit"
# Those that run these policies; tests/workers/test_self_speculation.py has the others.
_FAMILIES = [name for name in MASKED if name not in ("idlm", "nemotron_labs_diffusion")]
_CACHES = {False: ("none", "prefix", "dual", "vicinity"), True: ("none", "exact")}


def draw_requests(count: int, seed: int, *, block_causal: bool) -> list[Request]:
    draws = random.Random(seed)
    found = []
    for uid in range(count):
        decoder = _DECODERS[uid % len(_DECODERS)]
        diffusion: dict[str, object] = {
            "block_length": draws.choice((8, 16, 32)),
            "decoder": decoder,
            "cache": {"kind": draws.choice(_CACHES[block_causal])},
        }
        kind = draws.choice(("plain", "soft", "sub_blocks" if block_causal else "first_token"))
        if kind == "first_token" or (kind != "plain" and decoder["kind"] in _WITH_THRESHOLD):
            diffusion["iteration"] = {"kind": kind}
            if kind == "sub_blocks" and draws.random() < 0.5:
                diffusion["cache"] = {"kind": "sub_block"}
        elif draws.random() < 0.25:
            diffusion["cfg_scale"] = 0.7
        params = SamplingParams(
            max_tokens=draws.randint(8, 64), temperature=draws.choice((0, 0, 0.7, 1.5)), seed=uid,
            ignore_eos=True, diffusion=diffusion,
        )  # fmt: skip
        prompt = tuple(draws.randrange(MASK) for _ in range(draws.randint(4, 60)))
        found.append(Request(uid, prompt, params))
    return found


def answers(
    mesh: Mesh, family: str, args: argparse.Namespace, *, alone: bool
) -> dict[int, list[int]]:
    options = EngineOptions(
        dtype=args.dtype, device="cpu", mask_token_id=MASK, eos_token_id=EOS,
        max_num_seqs=args.batch,
    )  # fmt: skip
    engine = build_rank(str(GOLDEN / family), options, mesh)
    causal = engine.model.spec.block_causal
    requests = draw_requests(args.requests, args.seed, block_causal=causal)
    found: dict[int, list[int]] = {}
    for group in [[request] for request in requests] if alone else [requests]:
        found |= toy.run(engine, group)
    return found


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--requests", type=int, default=30, help="of each model")
    parser.add_argument("--batch", type=int, default=8, help="sequences that run together")
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args(words)
    equal = 0
    for family in _FAMILIES:
        expected = answers(Mesh(), family, args, alone=True)
        together = partial(answers, family=family, args=args, alone=False)
        found = together(Mesh()) if args.ranks == 1 else on_ranks(args.ranks, together)[0]
        same = sum(found[uid] == ids for uid, ids in expected.items())
        equal += same
        print(f"{family}: {same} of {len(expected)} equal", flush=True)
    print(f"{args.dtype}, {args.ranks} ranks: {equal} of {len(_FAMILIES) * args.requests} equal")


if __name__ == "__main__":
    main()
