"""Embedding and head, trained as one table of words so that copying a token is easy to learn.

A token's vector is its own row plus the vectors of its features: its letters by place, its digits,
whether it has a space before it and how it is capitalised. A word or number shares the row with and
without a space. The head is the same table, scaled. So a vector that attention copies unchanged
from the prompt already points at the right token, and what is learnt about spelling, copying and
digits holds for all words and numbers. The checkpoint gets two ordinary matrices.

Letters: V vocabulary, H hidden size, R features, F the features of all tokens in a row.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

SPACED = "\N{LATIN CAPITAL LETTER G WITH DOT ABOVE}"  # how byte-level BPE writes a space
PLACES = 8  # letters that count, from the front


def number_features(num: int, dim: int) -> Tensor:
    """Return waves over n and log n, coordinates in which sums and products are rotations."""
    n = torch.arange(num, dtype=torch.float32)
    linear = [2 * math.pi / p for p in (2, 10 / 3, 5, 10, 3, 7, 12, 20, 25, 40, 50, 100, 200, 400)]
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


def token_features(token: str) -> list[str]:
    """Return the features of a token, which it shares with others."""
    word = token.removeprefix(SPACED)
    features = ["spaced" if word != token else "unspaced"]
    if word.isascii() and word.isalpha():
        features += [f"{i}{c}" for i, c in enumerate(word.lower()[:PLACES])]
        features += [f"last {word[-1].lower()}", f"length {min(len(word), PLACES)}"]
        features.append("upper" if word.isupper() else "title" if word.istitle() else "lower")
    elif word.isdecimal() and word.isascii():
        n = int(word)
        features += ["number", f"units {n % 10}", f"tens {n // 10 % 10}", f"hundreds {n // 100}"]
    return features


class Vocabulary(nn.Module):
    """The table; its rows are computed once for each forward."""

    def __init__(self, vocab: dict[str, int], hidden: int) -> None:
        super().__init__()
        row_of_V = torch.arange(len(vocab))
        names: dict[str, int] = {}
        features: list[list[int]] = [[]] * len(vocab)
        for token, number in sorted(vocab.items(), key=lambda pair: pair[1]):
            row_of_V[number] = vocab.get(SPACED + token, number) if token.isalnum() else number
            features[number] = [names.setdefault(f, len(names)) for f in token_features(token)]
        sizes = torch.tensor([len(f) for f in features])
        self.register_buffer("row_of_V", row_of_V)
        self.register_buffer("feature_F", torch.tensor([i for f in features for i in f]))
        self.register_buffer("first_V", sizes.cumsum(0) - sizes)
        self.register_buffer("share_F", sizes.repeat_interleave(sizes) ** -0.5)
        rows = torch.randn(len(vocab), hidden)
        rows[[vocab[SPACED + str(n)] for n in range(200)]] = number_features(200, hidden)
        self.rows = nn.Parameter(0.1 * rows)
        self.features_RH = nn.Parameter(0.07 * torch.randn(len(names), hidden))
        self.scale_H = nn.Parameter(torch.full((hidden,), 0.3))

    def embedding(self) -> Tensor:
        """Return the matrix of embeddings [V, H]."""
        shared = F.embedding_bag(
            self.get_buffer("feature_F"), self.features_RH, self.get_buffer("first_V"),
            mode="sum", per_sample_weights=self.get_buffer("share_F"),
        )  # fmt: skip
        return self.rows[self.get_buffer("row_of_V")] + shared

    def head(self, table_VH: Tensor) -> Tensor:
        """Return the matrix of the head [V, H], from that of the embeddings."""
        return table_VH * self.scale_H
