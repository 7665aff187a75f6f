"""What credit decoding remembers of a block, and what it adds to logits.

A position remembers the ids that were on top of it, and the credit of each, which decays with every
step; the one on top gains. An id that never was on top has no credit, so these few are enough: the
vocabulary never appears, and the result is exact. `components/decoders/credit.py` has the rule.

Letters: R rows of the head, B rows of blocks, L positions of the longest block, K ids remembered of
a position.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from diffray.kernels.confidence import Confidence


class Gain(NamedTuple):
    """How a row gives credit: it adds alpha * ln(1 + credit) to logits."""

    alpha: float
    gamma: float  # the power of the probability that an id on top gains
    decay: float  # what each step multiplies credit by


class Gains(NamedTuple):
    """How each row gives credit; all are float64."""

    alpha_B: Tensor
    gamma_B: Tensor
    decay_B: Tensor  # -1 where a row gives none


class Memory(NamedTuple):
    """The ids that were on top, -1 for none, and their credit; both change in place.

    A block takes at most K steps, so an id that comes on top always finds a place.
    """

    ids_BLK: Tensor
    credit_BLK: Tensor  # float64; 0 where there is no id


class Credits(NamedTuple):
    """What rows remember, and how they give credit."""

    memory: Memory
    gains: Gains

    def known(self, cells_R: Tensor) -> Tensor:
        """Return the ids that are remembered of the head's rows; -1 is none."""
        return self.memory.ids_BLK.flatten(0, 1)[cells_R]


def remember(
    credits: Credits, cells_R: Tensor, masked_BL: Tensor, top_R: Tensor, logprob_R: Tensor
) -> tuple[Tensor, Tensor]:
    """Let the ids on top of masked positions gain; return what to add to which logits, [R, K].

    `cells_R` is a flat index into [B, L]; of -1, no id, it is 0.
    """
    memory, gains = credits
    ids_CK, credit_CK = (part.flatten(0, 1) for part in memory)
    row_R = cells_R // masked_BL.shape[1]
    alpha_R1, gamma_R1, decay_R1 = (part[row_R].unsqueeze(1) for part in gains)
    ids_RK, top_R1 = ids_CK[cells_R], top_R.unsqueeze(1)
    known_RK, free_RK = ids_RK == top_R1, ids_RK < 0
    first_RK = free_RK & (free_RK.cumsum(1) == 1)
    place_RK = torch.where(known_RK.any(1, keepdim=True), known_RK, first_RK)
    place_RK &= masked_BL.flatten()[cells_R].unsqueeze(1) & (decay_R1 >= 0)
    ids_RK = torch.where(place_RK, top_R1, ids_RK)
    gain_R1 = (gamma_R1 * logprob_R.double().unsqueeze(1)).exp()
    credit_RK = credit_CK[cells_R] * decay_R1 + place_RK * gain_R1
    ids_CK.index_copy_(0, cells_R, ids_RK)
    credit_CK.index_copy_(0, cells_R, credit_RK)
    return ids_RK, alpha_R1 * torch.log1p(credit_RK)


class Rewarding(NamedTuple):
    """The arguments of `reward` but the first."""

    credits: Credits
    cells_R: Tensor
    masked_BL: Tensor
    mask_token_id: int

    @staticmethod
    def made_up(
        rows: int, length: int, vocab: int, device: torch.device | str = "cpu"
    ) -> "Rewarding":
        """Return rows in the middle of a block, every third without credit.

        For trials and checks; the head has a row for each position.
        """
        cells_BL = torch.arange(rows * length, device=device).view(rows, length)
        gives_B = torch.arange(rows, device=device) % 3 < 2
        places_K = torch.arange(length, device=device)
        ids_BLK = (cells_BL.unsqueeze(2) * 31 + places_K * 7919) % vocab
        ids_BLK[:, ::5, 0] = vocab - 1
        kept_BLK = (places_K < -(-length // 4)) & gives_B.view(-1, 1, 1)  # most remember few
        credit_BLK = 0.4 * ((cells_BL.unsqueeze(2) + places_K) % 7).double()
        memory = Memory(ids_BLK.where(kept_BLK, -1), credit_BLK.where(kept_BLK, 0.0))
        alpha_B = 0.7 + torch.zeros_like(gives_B, dtype=torch.float64)
        gains = Gains(alpha_B, alpha_B - 0.5, (alpha_B + 0.1).where(gives_B, -1.0))
        masked_BL = cells_BL % 4 > 0
        return Rewarding(Credits(memory, gains), cells_BL.flatten(), masked_BL, vocab - 1)


def reward(
    found: Confidence, credits: Credits, cells_R: Tensor, masked_BL: Tensor, mask_token_id: int
) -> Confidence:
    """Return what would have been found, had credit been added to the logits; no row draws.

    Gathered are the mask's logit and those of the ids that were known. Only known ids gain, so no
    other logits are needed: the best is the best of before or one of them.
    """
    known_RK = credits.known(cells_R)
    mask_R, lse_R, logits_RK = found.gathered_RK[:, 0], found.logsumexp_R, found.gathered_RK[:, 1:]
    top_R = torch.maximum(found.best_R, mask_R)
    # Of equals the lowest id is on top.
    is_mask_R = (mask_R > found.best_R) | ((mask_R == top_R) & (mask_token_id < found.ids_R))
    top_ids_R = found.ids_R.masked_fill(is_mask_R, mask_token_id)
    ids_RK, values_RK = remember(credits, cells_R, masked_BL, top_ids_R, top_R - lse_R)
    # What has only become known now is what is on top.
    logits_RK = logits_RK.where(ids_RK == known_RK, top_R.unsqueeze(1))
    logits_RK = logits_RK.masked_fill(ids_RK < 0, -torch.inf).to(values_RK)
    raised_RK = logits_RK + values_RK
    lse_R = _exchanged(lse_R, logits_RK, raised_RK).to(lse_R)

    raised_RK = raised_RK.to(top_R)
    is_mask_RK = ids_RK == mask_token_id
    mask_R = torch.maximum(mask_R, raised_RK.masked_fill(~is_mask_RK, -torch.inf).amax(1))
    others_RK = raised_RK.masked_fill(is_mask_RK, -torch.inf)
    rivals_RK = torch.cat([found.best_R.unsqueeze(1), others_RK], dim=1)
    best_R = rivals_RK.amax(1)
    rival_ids_RK = torch.cat([found.ids_R.unsqueeze(1), ids_RK], dim=1)
    lost_RK = rivals_RK < best_R.unsqueeze(1)
    winner_R = rival_ids_RK.masked_fill(lost_RK, torch.iinfo(torch.long).max).amin(1)
    return Confidence(winner_R, best_R, best_R, best_R, lse_R, mask_R.unsqueeze(1))


def _exchanged(lse_R: Tensor, before_RK: Tensor, after_RK: Tensor) -> Tensor:
    """Return the log-sum-exp with some logits in the place of others."""
    peak_R1 = torch.maximum(lse_R.to(after_RK), after_RK.amax(1)).unsqueeze(1)
    gain_R = ((after_RK - peak_R1).exp() - (before_RK - peak_R1).exp()).sum(1)
    return peak_R1.squeeze(1) + ((lse_R - peak_R1.squeeze(1)).exp() + gain_R).log()
