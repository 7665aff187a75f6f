"""What credit decoding remembers about a block, and what it adds to logits.

A position remembers the ids that have been its top id, and the credit of each. Credit decays with
every step, and the current top id gains some. An id that was never on top has no credit, so the
result is exact without the rest of the vocabulary. `components/decoders/credit.py` has the rule.

Letters: R rows of the head, B rows of blocks, L positions of the longest block, K ids remembered of
a position.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from diffray.kernels.confidence import Confidence


class Gains(NamedTuple):
    """How each row gives credit; all are float64."""

    alpha_B: Tensor
    gamma_B: Tensor
    decay_B: Tensor  # -1 if a row gives no credit


class Memory(NamedTuple):
    """The ids that were on top, -1 for none, and their credit; both change in place.

    A block takes at most K steps, so a new top id always finds a free place.
    """

    ids_BLK: Tensor
    credit_BLK: Tensor  # float64; 0 where there is no id


class Credits(NamedTuple):
    """What rows remember, and how they give credit."""

    memory: Memory
    gains: Gains

    def known(self, cells_R: Tensor) -> Tensor:
        """Return the ids remembered for each row of the head; -1 for none."""
        return self.memory.ids_BLK.flatten(0, 1)[cells_R]


def remember(
    credits: Credits, cells_R: Tensor, masked_BL: Tensor, top_R: Tensor, logprob_R: Tensor
) -> tuple[Tensor, Tensor]:
    """Credit the top ids of masked positions; return ids and what to add to their logits [R, K].

    `cells_R` is a flat index into [B, L]. An id of -1 stands for none; 0 is added for it.
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
    """The arguments of `reward` after the first."""

    credits: Credits
    cells_R: Tensor
    masked_BL: Tensor
    mask_token_id: int

    @staticmethod
    def made_up(
        rows: int, length: int, vocab: int, device: torch.device | str = "cpu"
    ) -> "Rewarding":
        """Return rows in the middle of a block; every third gives no credit.

        For checks; the head has a row for each position.
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
    """Return what `confidence` would find with credit added to the logits; no row draws.

    `found` has gathered the logits of the mask and of the known ids. Only known ids have credit, so
    no other logits are needed: the new best id is the old one or a known one.
    """
    known_RK = credits.known(cells_R)
    mask_R, lse_R, logits_RK = found.gathered_RK[:, 0], found.logsumexp_R, found.gathered_RK[:, 1:]
    top_R = torch.maximum(found.best_R, mask_R)
    # Ties go to the lowest id.
    is_mask_R = (mask_R > found.best_R) | ((mask_R == top_R) & (mask_token_id < found.ids_R))
    top_ids_R = found.ids_R.masked_fill(is_mask_R, mask_token_id)
    ids_RK, values_RK = remember(credits, cells_R, masked_BL, top_ids_R, top_R - lse_R)
    # An id that became known only now is the top id.
    logits_RK = logits_RK.where(ids_RK == known_RK, top_R.unsqueeze(1))
    logits_RK = logits_RK.masked_fill(ids_RK < 0, -torch.inf).to(values_RK)
    raised_RK = logits_RK + values_RK
    lse_R = _replace_logits(lse_R, logits_RK, raised_RK).to(lse_R)

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


def _replace_logits(lse_R: Tensor, before_RK: Tensor, after_RK: Tensor) -> Tensor:
    """Return the log-sum-exp after replacing some logits."""
    peak_R1 = torch.maximum(lse_R.to(after_RK), after_RK.amax(1)).unsqueeze(1)
    gain_R = ((after_RK - peak_R1).exp() - (before_RK - peak_R1).exp()).sum(1)
    return peak_R1.squeeze(1) + ((lse_R - peak_R1.squeeze(1)).exp() + gain_R).log()
