"""Embedding and head, trained as one table of words so that copying a token is easy to learn.

A word in a sentence has a space before it, in JSON it has none: two tokens, here one row and a
vector that tells them apart. The head is the same table, scaled. So what attention brings from the
prompt unchanged already points at the right token, and whatever is learnt about copying one word
holds for all. The checkpoint gets two ordinary matrices.

Letters: V vocabulary, H hidden size.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

SPACED = "\N{LATIN CAPITAL LETTER G WITH DOT ABOVE}"  # how byte-level BPE writes a space


def number_features(num: int, dim: int) -> Tensor:
    """Waves over n and over log n: the coordinates in which sums and products are rotations."""
    n = torch.arange(num, dtype=torch.float32)
    linear = [2 * math.pi / p for p in (2, 3, 5, 7, 10, 12, 20, 25, 40, 50, 100, 200, 400)]
    logarithmic = [2 * math.pi / p for p in (0.4, 0.8, 1.6, 3.2, 6.4)]
    angle = torch.cat(
        (
            torch.outer(n, torch.tensor(linear)),
            torch.outer((n + 1).log(), torch.tensor(logarithmic)),
        ),
        dim=1,
    )
    waves = torch.cat((angle.cos(), angle.sin()), dim=1)
    return torch.cat((waves, torch.randn(num, dim - waves.shape[1]) * 0.5), dim=1)


class Vocabulary(nn.Module):
    """The table; its rows are computed once for each forward."""

    def __init__(self, vocab: dict[str, int], hidden: int) -> None:
        super().__init__()
        row_of_V = torch.arange(len(vocab))
        for token, number in vocab.items():
            row_of_V[number] = vocab.get(SPACED + token, number) if token.isalpha() else number
        self.register_buffer("row_of_V", row_of_V)
        rows = torch.randn(len(vocab), hidden)
        rows[[vocab[str(n)] for n in range(200)]] = number_features(200, hidden)
        self.rows = nn.Parameter(0.1 * rows)
        self.unspaced_H = nn.Parameter(0.1 * torch.randn(hidden))
        self.scale_H = nn.Parameter(torch.full((hidden,), 0.3))

    def embedding(self) -> Tensor:
        """The matrix of embeddings [V, H]."""
        row_of_V = self.get_buffer("row_of_V")
        paired_V1 = (row_of_V != torch.arange(len(row_of_V))).unsqueeze(1)
        return self.rows[row_of_V] + paired_V1 * self.unspaced_H

    def head(self) -> Tensor:
        """The matrix of the head [V, H]."""
        return self.embedding() * self.scale_H

    def embed(self, ids: Tensor) -> Tensor:
        return F.embedding(ids, self.embedding())

    def logits(self, hidden: Tensor) -> Tensor:
        return F.linear(hidden, self.head())
