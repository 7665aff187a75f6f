"""What two ranks do in tests/workers/test_one_shot.py: open sums, and generate with them."""

from collections.abc import Sequence as Items
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from diffray import SamplingParams
from diffray.components.mesh import Mesh
from diffray.workers.bring_up.one_shot import MOST_BYTES, use_one_shot
from diffray.workers.engine_options import EngineOptions
from diffray.workers.messages import Request
from diffray.workers.setup import build_rank
from tests.helpers import stand_in_sums
from tests.helpers.toy import prompt_of, run


def opened(mesh: Mesh, names: Items[str]) -> list[tuple[bool, list[str]]]:
    """Return, for each kind of sum, whether it is used here and what this rank says."""
    found = []
    for name in names:
        said: list[str] = []
        got = use_one_shot(mesh, torch.float32, said.append, getattr(stand_in_sums, name))
        found.append((got.one_shot is not None, said))
    return found


class Generated(NamedTuple):
    """Tokens, and the shapes of the sums behind them, in their order."""

    tokens: dict[int, list[int]]
    one_shot: list[tuple[int, ...]]
    group: list[tuple[int, ...]]


def generated(mesh: Mesh, model: str, most_bytes: int = MOST_BYTES) -> Generated:
    found = Generated({}, [], [])
    plain = Mesh.all_reduce

    def noted_sum(x: Tensor) -> Tensor:
        found.one_shot.append(tuple(x.shape))
        return stand_in_sums.sum_of(mesh, x)

    def noted(self: Mesh, x: Tensor) -> Tensor:
        if self.one_shot is None or not self.one_shot.fits(x):
            found.group.append(tuple(x.shape))
        return plain(self, x)

    if mesh.size > 1:
        summing = use_one_shot(mesh, torch.float64, print, lambda *_: noted_sum)
        assert summing.one_shot is not None
        found.one_shot.clear()
        one_shot = summing.one_shot._replace(most_bytes=most_bytes)
        mesh = replace(summing, one_shot=one_shot)
    Mesh.all_reduce = noted  # type: ignore[method-assign]  # in this process alone
    options = EngineOptions(
        dtype="float64", device="cpu", mask_token_id=510, eos_token_id=511, max_num_seqs=2,
        max_model_len=96,
    )  # fmt: skip
    params = SamplingParams(max_tokens=16, ignore_eos=True, diffusion={"block_length": 8})
    requests = [Request(uid, prompt_of(5 + 3 * uid), params) for uid in range(3)]
    engine = build_rank(model, options, mesh)
    return found._replace(tokens=run(engine, requests))


def alone(model: str) -> dict[int, list[int]]:
    return generated(Mesh(device=torch.device("cpu")), model).tokens
