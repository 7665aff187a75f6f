"""The serving engine with random weights; a script says how many tokens each step accepts.

It needs what the engine needs: pydantic, safetensors and tqdm.
"""

import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Items
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from benchmarks.gpu.random_model import counted_experts
from benchmarks.gpu.shapes import Shape
from diffray.components.block import Block, Proposal
from diffray.components.decoder import Decoder
from diffray.components.decoders.credit import Credit
from diffray.components.denoiser import Denoiser
from diffray.components.mesh import Mesh
from diffray.components.params import SamplingParams
from diffray.components.sequence import Sequence
from diffray.kernels.rules import Rule
from diffray.workers.batch_plan import BatchPlan
from diffray.workers.engine import Engine
from diffray.workers.engine_options import EngineOptions
from diffray.workers.graphs import Bucket, Recorded
from diffray.workers.messages import Request
from diffray.workers.setup import engine_of

HOST_PARTS = "before", "beside", "after"


class ScriptedCredit(Credit):
    """Does all that credit decoding does, but accepts what a script says."""

    script: Decoder

    def accept(self, proposal: Proposal, block: Block) -> Tensor:
        return self.script.accept(proposal, block)

    def rule(self, sequence: Sequence) -> Rule | None:
        return self.script.rule(sequence)


def random_engine(model: Denoiser, **options: Any) -> Engine:
    """Return an engine; the last two ids of the vocabulary are the mask and the end of text.

    It does not cache prefixes, so that no run reads what an earlier one stored.
    """
    vocab = model.spec.vocab_size
    setup = EngineOptions(enable_prefix_caching=False, **options)
    return engine_of(model, setup, vocab - 2, (vocab - 1,), Mesh())


def scripted(
    uid: int, shape: Shape, prompt_len: int, max_tokens: int, steps: int, block: int, cache: str
) -> Request:
    """Return a request of random ids that takes `steps` steps, whatever the model predicts.

    The steps are spread evenly over the blocks, and a block's masks evenly over its steps.
    """
    draw = torch.Generator().manual_seed(uid)
    prompt = torch.randint(0, shape.vocab - 2, (prompt_len,), generator=draw).tolist()
    diffusion = {
        "block_length": block,
        "decoder": {"kind": "fixed", "steps": steps},
        "cache": {"kind": cache},
        "canvas": "fixed",
    }
    params = SamplingParams(max_tokens=max_tokens, ignore_eos=True, diffusion=diffusion)
    return Request(uid, tuple(prompt), params)


def run_to_the_end(
    engine: Engine, requests: Items[Request], steps: int = 1, decoder: str = "fixed"
) -> Iterator[float]:
    """Run scripted requests; yield each round's seconds, including the wait for the device."""
    for request in requests:
        sequence = engine.check(request)
        if decoder == "credit":
            policy = sequence.policy
            sequence.canvas.policy = replace(policy, decoder=ScriptedCredit(script=policy.decoder))
        engine.enqueue(sequence)
    while not engine.idle:
        begin = time.perf_counter()
        engine.step(steps)
        yield time.perf_counter() - begin


@contextmanager
def host_seconds() -> Iterator[dict[str, float]]:
    """Yield the CPU seconds of this thread in each part of the rounds in the `with` block.

    *Before* a forward the engine admits, plans and lays out windows. *Beside* it are the choice of
    tokens and the canvases, which a GPU receives while it still runs the forward. *After* it the
    outcome has arrived and becomes updates. Before and after, a GPU is idle. The engine has no code
    for this: the methods at which parts start and end are wrapped.
    """
    seconds: dict[str, float] = defaultdict(float)
    part, since = "", 0.0

    def enter(following: str) -> None:
        nonlocal part, since
        now = time.thread_time()
        seconds[part] += now - since
        part, since = following, now

    def timed(method: Callable[..., Any], during: str, then: str) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            enter(during)
            try:
                return method(*args, **options)
            finally:
                enter(then)

        return call

    with (
        patch.object(Engine, "step", timed(Engine.step, "before", "")),
        patch.object(BatchPlan, "_hidden", timed(BatchPlan._hidden, "forward", "beside")),
        patch.object(Denoiser, "confidence", timed(Denoiser.confidence, "forward", "beside")),
        patch.object(BatchPlan, "outcomes", timed(BatchPlan.outcomes, "beside", "after")),
    ):
        yield seconds


@contextmanager
def replays() -> Iterator[list[Bucket]]:
    """Yield a list to which the bucket of every replayed recording is added."""
    seen: list[Bucket] = []
    forward = Recorded.forward

    def noted(recorded: Recorded) -> Tensor:
        seen.append(recorded.bucket)
        return forward(recorded)

    with patch.object(Recorded, "forward", noted):
        yield seen


def experts_met(
    engine: Engine, requests: Items[Request], steps: int, decoder: str
) -> dict[str, float]:
    """Run the requests without graphs, whose replays call no hooks; return the experts met."""
    assert isinstance(engine.model, Denoiser)
    graphs, engine.graphs = engine.graphs, None
    with counted_experts(engine.model) as found:
        list(run_to_the_end(engine, requests, steps, decoder))
    engine.graphs = graphs
    return found
