"""Logits of a few rows of the head, about three blocks, and what is kept of them on each rank."""

import pytest
import torch
from torch import Tensor

from diffray.components.block import Block, Proposal
from diffray.components.logits import Logits
from diffray.components.mesh import Mesh
from diffray.components.propose import joined
from diffray.kernels.confidence import Confidence, Draw, confidence_of_logits
from tests.helpers.decoding import block_of

VOCAB, MASK = 24, 5
ROWS, LENGTH = 3, 4
CELLS = torch.tensor([0, 2, 3, 4, 5, 9, 10])
MASK_R1 = torch.full((len(CELLS), 1), MASK)
SIZES = pytest.mark.parametrize("size", [1, 2, 3])


def logits() -> Tensor:
    draw = torch.Generator().manual_seed(8)
    values = torch.randn(len(CELLS), VOCAB, generator=draw, dtype=torch.float64) * 2
    values[1, MASK] = 9.0  # the model would rather keep the mask
    values[2, [3, 11, 20]] = 7.0  # equals, each on another rank
    values[3, MASK] = values[3].max()  # as sure of the mask as of its best
    return values


def block() -> Block:
    number = torch.arange(ROWS)
    positions_BL = torch.arange(7, 7 + ROWS * LENGTH).view(ROWS, LENGTH)
    masked_BL = torch.ones(ROWS, LENGTH, dtype=torch.bool)
    return block_of(masked_BL, positions_BL=positions_BL, seed_B=number * 13 + 1, step_B=number)


def shard_of(mesh: Mesh, values_RV: Tensor) -> Logits:
    start, stop = mesh.shard(VOCAB, "vocabulary")
    return Logits(values_RV[:, start:stop], start, mesh)


def kept_of(mesh: Mesh, values_RV: Tensor, gather_RK: Tensor, draw: Draw | None) -> Confidence:
    """Return what is kept of logits, joined over the ranks."""
    part = shard_of(mesh, values_RV)
    found = confidence_of_logits(part.values_RV, part.start, MASK, gather_RK, draw)
    return joined(found, mesh)


def as_one(proposal: Proposal) -> Tensor:
    return torch.stack(
        [proposal.ids_BL.double(), proposal.confidence_BL.double(), proposal.logprob_BL.double()]
    )
