"""Toys whose weights can be replaced, and what each set of weights writes."""

import os
from collections.abc import Collection, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from diffray.components.layers import Parts, whole
from diffray.components.params import SamplingParams
from diffray.workers.changes import Changes
from diffray.workers.engine import Engine
from diffray.workers.messages import Request
from diffray.workers.sleeper import Sleeper
from tests.helpers.toy import ToyModel, run, toy_engine

CONFIG: dict[str, Any] = {}


class UpdatableToy(ToyModel):
    dtype = torch.float64
    quantized = False

    @property
    def tensors(self) -> dict[str, Tensor]:
        named = {"table": self.table_VH, "places": self.places, "head": self.head_VH}
        for number, layer in enumerate(self.layers):
            named |= {f"layers.{number}.{part}": each for part, each in enumerate(layer)}
        return named

    def parts(self, names: Collection[str]) -> Parts:
        return {name: whole(tensor) for name, tensor in self.tensors.items()}

    def parameters(self) -> Iterator[nn.Parameter]:
        raise AssertionError("its weights have no checkpoint to come back from")

    def pack(self) -> None: ...

    def unpack(self) -> bool:
        return False


@cache
def weights(seed: int) -> dict[str, Tensor]:
    return UpdatableToy(seed=seed).tensors


def updatable(block_causal: bool = False, **options: Any) -> Engine:
    """Return an engine with the weights of seed 0."""
    model = UpdatableToy(block_causal)
    engine = toy_engine(model, **options)
    plan = UpdatableToy(block_causal)
    sleeper = Sleeper(model, engine.kv)
    nowhere = Path("/nowhere")
    engine.changes = Changes(
        model, plan, CONFIG, engine.kv, engine.mesh, first=nowhere, sleeper=sleeper
    )
    return engine


def written(seed: int, requests: list[Request], block_causal: bool = False) -> list[list[int]]:
    """Return what each request would be answered by these weights alone."""
    model = UpdatableToy(block_causal, seed)
    return [run(toy_engine(model), [request])[request.uid] for request in requests]


def asked(uid: int, length: int = 3, **params: Any) -> Request:
    prompt = tuple((7 * uid + at) % 60 for at in range(length))
    given: dict[str, Any] = {"max_tokens": 24, "ignore_eos": True, "diffusion": {"block_length": 8}}
    return Request(uid, prompt, SamplingParams(**given | params))


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")
