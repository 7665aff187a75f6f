"""The engine that serves, over a model of random weights made on the device.

Letters: as in the rooms.
"""

import time
from collections.abc import Iterator
from typing import Any

import torch

from benchmarks.gpu.shapes import Shape
from diffray.components.denoiser import Denoiser
from diffray.components.mesh import Mesh
from diffray.components.params import SamplingParams
from diffray.workers.engine import Engine
from diffray.workers.engine_options import EngineOptions
from diffray.workers.messages import Request
from diffray.workers.setup import engine_of


def random_engine(model: Denoiser, **options: Any) -> Engine:
    """Return an engine; the last two ids of the vocabulary are the mask and the end of text.

    No run finds what the one before has stored.
    """
    vocab = model.spec.vocab_size
    setup = EngineOptions(enable_prefix_caching=False, **options)
    return engine_of(model, setup, vocab - 2, (vocab - 1,), Mesh())


def scripted(
    uid: int, shape: Shape, prompt_len: int, max_tokens: int, steps: int, block: int, cache: str
) -> Request:
    """Return a request of random ids that takes so many steps, whatever the model says.

    The steps are spread evenly over the blocks, and a block's masks evenly over its steps.
    """
    draw = torch.Generator().manual_seed(uid)
    prompt = torch.randint(0, shape.vocab - 2, (prompt_len,), generator=draw).tolist()
    diffusion = {
        "block_length": block,
        "decoder": {"kind": "fixed", "steps": steps},
        "cache": {"kind": cache},
    }
    params = SamplingParams(max_tokens=max_tokens, ignore_eos=True, diffusion=diffusion)
    return Request(uid, tuple(prompt), params)


def run_to_the_end(engine: Engine, requests: list[Request], steps: int = 1) -> Iterator[float]:
    """Run the requests; yield each round's seconds, the wait for the device included."""
    for request in requests:
        engine.add(request)
    while not engine.idle:
        begin = time.perf_counter()
        engine.step(steps)
        yield time.perf_counter() - begin
