"""Row transforms: what a request does to the logits of its rows before tokens are chosen.

A request carries a tuple of them, in the order in which they are applied. Those of one kind are
planned and applied for a whole batch together.
Letters: R rows of the head, V this rank's vocabulary, E single logits, K ids, U rows of guided
requests.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from collections.abc import Sequence as Items
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, NamedTuple, Protocol, Self

import torch
from torch import Tensor

from diffray.components.backend import send
from diffray.components.logits import Logits

if TYPE_CHECKING:
    from diffray.components.params import SamplingParams

Head = Callable[[Tensor], Tensor]  # from packed tokens to this rank's logits about them


class Where(NamedTuple):
    """The rows of one request, on the host."""

    rows: slice
    positions_R: Tensor  # that the rows are about
    twins_R: Tensor | None  # where a request is guided: the packed tokens of its twin window

    @property
    def rows_R(self) -> Tensor:
        return torch.arange(self.rows.start, self.rows.stop)


class Planned(ABC):
    """The transforms of one kind, as tensors."""

    @classmethod
    def join(cls, parts: Items[Self], device: torch.device) -> Self:
        """Return the parts as one, on the device."""
        names = [field.name for field in fields(cls)]  # type: ignore[arg-type]  # a dataclass
        return cls(*(send(torch.cat([getattr(p, n) for p in parts]), device) for n in names))

    @abstractmethod
    def apply(self, logits: Logits, head: Head) -> None:
        """Change the logits in place."""


class RowTransform(Protocol):
    """What one request asks for."""

    def plan(self, where: Where) -> Planned | None:
        """Return what is to be done to the request's rows, on the host; None if nothing is."""
        ...


@dataclass(frozen=True, slots=True)
class Guided(Planned):
    """Rows whose logits are led away from what their twins find, as LLaDA's sampler does."""

    rows_U: Tensor
    twins_U: Tensor
    scale_U: Tensor

    def apply(self, logits: Logits, head: Head) -> None:
        values_RV = logits.values_RV
        blind_UV = head(self.twins_U).to(values_RV)
        scale_U1 = self.scale_U.unsqueeze(1).to(values_RV)
        values_RV[self.rows_U] = blind_UV + (scale_U1 + 1) * (values_RV[self.rows_U] - blind_UV)


@dataclass(frozen=True, slots=True)
class LogitBias(Planned):
    """What is added to single logits; -inf forbids a token."""

    rows_E: Tensor
    ids_E: Tensor
    values_E: Tensor

    def apply(self, logits: Logits, head: Head) -> None:
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

    def apply(self, logits: Logits, head: Head) -> None:
        for rows, ids_K in self.kept:
            logits.keep_only(rows, ids_K)


KINDS: tuple[type[Planned], ...] = Guided, LogitBias, KeptIds  # in the order in which they apply


@dataclass(frozen=True, slots=True)
class Guidance:
    """Classifier-free guidance; the request has a second window, in which the prompt is masked."""

    scale: float

    def plan(self, where: Where) -> Guided:
        assert where.twins_R is not None
        scales = torch.full(where.twins_R.shape, self.scale, dtype=torch.float64)
        return Guided(where.rows_R, where.twins_R, scales)


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
class Only:
    """Allow these ids and no others."""

    ids: tuple[int, ...]

    def plan(self, where: Where) -> KeptIds:
        return KeptIds(((where.rows, torch.tensor(self.ids)),))


def transforms_of(
    params: "SamplingParams", cfg_scale: float, end_ids: frozenset[int], prompt_len: int
) -> tuple[RowTransform, ...]:
    """Return what a request does to its logits, in the order of `KINDS`."""
    found: list[RowTransform] = []
    if cfg_scale > 0:
        found.append(Guidance(cfg_scale))
    if params.logit_bias:
        found.append(Bias(tuple(params.logit_bias.items())))
    if params.bad_token_ids:
        found.append(Bias.forbid(params.bad_token_ids))
    if params.min_tokens and end_ids:
        found.append(Bias.forbid(sorted(end_ids), stop=prompt_len + params.min_tokens))
    if params.allowed_token_ids:
        found.append(Only(tuple(sorted({*params.allowed_token_ids, *end_ids}))))
    return tuple(found)
