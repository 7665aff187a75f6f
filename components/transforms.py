"""Row transforms: what a request does to the logits of its rows before tokens are chosen.

Letters: R rows of the head, E single logits, K ids.
"""

from collections.abc import Sequence as Items
from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

import torch
from torch import Tensor

from diffray.components.backend import send
from diffray.components.grammar.paths import LEFT_OUT
from diffray.components.logits import Logits
from diffray.components.penalties import Penalized, Penalties
from diffray.components.row_transform import Planned, RowTransform, Step, Where

if TYPE_CHECKING:
    from diffray.components.params import SamplingParams


@dataclass(frozen=True, slots=True)
class LogitBias(Planned):
    """Values that are added to single logits; -inf forbids a token."""

    rows_E: Tensor
    ids_E: Tensor
    values_E: Tensor

    def apply(self, logits: Logits, step: Step) -> None:
        self.add_to(logits)

    def add_to(self, logits: Logits) -> None:
        """Add, in place."""
        logits.add(self.rows_E, self.ids_E, self.values_E)


@dataclass(frozen=True, slots=True)
class KeptIds(Planned):
    """Rows that may take these ids and no others."""

    kept: tuple[tuple[slice, Tensor], ...]

    @classmethod
    def join(cls, parts: Items[Self], device: torch.device) -> Self:
        return cls(tuple((rows, send(ids, device)) for part in parts for rows, ids in part.kept))

    def apply(self, logits: Logits, step: Step) -> None:
        for rows, ids_K in self.kept:
            logits.keep_only(rows, ids_K)


# In the order in which they apply.
KINDS: tuple[type[Planned], ...] = LogitBias, Penalized, KeptIds


@dataclass(frozen=True, slots=True)
class Bias:
    """Add to the logits of some ids, at positions before `stop` if there is one."""

    values: tuple[tuple[int, float], ...]
    stop: int | None = None

    @staticmethod
    def forbid(ids: Items[int], stop: int | None = None) -> "Bias":
        return Bias(tuple((token_id, -torch.inf) for token_id in ids), stop)

    def plan(self, where: Where) -> LogitBias | None:
        rows_R = where.rows_R
        if self.stop is not None:
            rows_R = rows_R[where.positions_R < self.stop]
        if not len(rows_R):
            return None
        ids, values = zip(*self.values, strict=True)
        return LogitBias(
            rows_R.repeat_interleave(len(ids)),
            torch.tensor(ids).repeat(len(rows_R)),
            torch.tensor(values, dtype=torch.float64).repeat(len(rows_R)),
        )


@dataclass(frozen=True, slots=True)
class NoRepeat:
    """Do not repeat `size` tokens in a row, in blocks of one position: all before it is final.

    If nothing else is allowed, they are repeated anyway.
    """

    size: int

    def plan(self, where: Where) -> LogitBias | None:
        text_N = torch.tensor(where.sequence.canvas.tokens(0, where.sequence.block.start))
        if len(text_N) < self.size:
            return None
        runs_NS = text_N.unfold(0, self.size, 1)
        again_N = (runs_NS[:, :-1] == text_N[len(text_N) - self.size + 1 :]).all(1)
        ids = runs_NS[again_N, -1].unique().tolist()
        return Bias(tuple((token_id, -LEFT_OUT) for token_id in ids)).plan(where) if ids else None


@dataclass(frozen=True, slots=True)
class Only:
    """Allow these ids and no others."""

    ids: tuple[int, ...]

    def plan(self, where: Where) -> KeptIds:
        return KeptIds(((where.rows, torch.tensor(self.ids)),))


def transforms_of(
    params: "SamplingParams", end_ids: frozenset[int], prompt_len: int
) -> tuple[RowTransform, ...]:
    """Return what a request does to its logits, in the order of `KINDS`."""
    found: list[RowTransform] = []
    if params.logit_bias:
        found.append(Bias(tuple(params.logit_bias.items())))
    if params.bad_token_ids:
        found.append(Bias.forbid(params.bad_token_ids))
    if params.min_tokens and end_ids:
        found.append(Bias.forbid(sorted(end_ids), stop=prompt_len + params.min_tokens))
    if params.no_repeat_ngram_size:
        found.append(NoRepeat(params.no_repeat_ngram_size))
    penalties = params.presence_penalty, params.frequency_penalty, params.repetition_penalty
    if penalties != (0, 0, 1):
        found.append(Penalties(*penalties))
    if params.allowed_token_ids:
        found.append(Only(tuple(sorted({*params.allowed_token_ids, *end_ids}))))
    return tuple(found)
