"""A plain sampler for the training loop: threshold decoding, block by block, without a cache.

Shapes: B batch, L length, V vocabulary.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from examples.train_demo.model import DemoModel

BLOCK = 32


class Sample(NamedTuple):
    tokens: list[int]
    forwards: int


def _canvas(
    prompts: list[list[int]], max_tokens: int, mask_id: int, causal: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Return ids, positions' blocks (below 0 in a bidirectional prompt), and what is real."""
    sizes = [len(p) + max_tokens for p in prompts]
    if causal:
        sizes = [-(-size // BLOCK) * BLOCK for size in sizes]
    ids_BL = torch.full((len(prompts), max(sizes)), mask_id)
    for row, prompt in zip(ids_BL, prompts, strict=True):
        row[: len(prompt)] = torch.tensor(prompt)
    position_L = torch.arange(max(sizes))
    start_B1 = torch.tensor([0 if causal else len(p) for p in prompts])[:, None]
    return ids_BL, (position_L - start_B1) // BLOCK, position_L < torch.tensor(sizes)[:, None]


@torch.no_grad()
def generate(
    model: DemoModel,
    prompts: list[list[int]],
    max_tokens: int,
    mask_id: int,
    eos_id: int,
    threshold: float = 0.9,
) -> list[Sample]:
    """Decode a batch; every row stops after the block that contains its first EOS."""
    causal = model.shape.causal
    ids_BL, block_BL, real_BL = _canvas(prompts, max_tokens, mask_id, causal)
    length = ids_BL.shape[1]
    forwards_B = torch.zeros(len(prompts), dtype=torch.long)
    active_B = torch.ones(len(prompts), dtype=torch.bool)
    starts = [len(p) for p in prompts]
    while active_B.any():
        masked_BL = (ids_BL == mask_id) & real_BL
        current_B1 = block_BL.masked_fill(~masked_BL, length).amin(1, keepdim=True)
        eligible_BL = masked_BL & (block_BL == current_B1) & active_B[:, None]
        logits_BLV = model(ids_BL, real_BL).float()
        logits_BLV[..., mask_id] = -torch.inf
        confidence_BL, token_BL = logits_BLV.softmax(-1).max(-1)
        confidence_BL = confidence_BL.masked_fill(~eligible_BL, -torch.inf)
        enough_B1 = (confidence_BL.amax(1, keepdim=True) - 1e-5).clamp(max=threshold)
        commit_BL = eligible_BL & (confidence_BL >= enough_B1)
        ids_BL = torch.where(commit_BL, token_BL, ids_BL)
        forwards_B += active_B
        masked_BL = (ids_BL == mask_id) & real_BL
        for b, start in enumerate(starts):
            block_done = not bool((masked_BL[b] & (block_BL[b] == current_B1[b])).any())
            decided = ids_BL[b, start:][~masked_BL[b, start:] & real_BL[b, start:]]
            if not bool(masked_BL[b].any()) or (block_done and bool((decided == eos_id).any())):
                active_B[b] = False
    samples = []
    for b, start in enumerate(starts):
        row = ids_BL[b, start : start + max_tokens].tolist()
        stop = next((i for i, t in enumerate(row) if t in (eos_id, mask_id)), len(row))
        samples.append(Sample(row[:stop], int(forwards_B[b])))
    return samples
