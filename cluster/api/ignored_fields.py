"""Unknown fields under `--ignore-unknown-fields`: left out of a body, and named in its answer."""

from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass
from typing import Final

from diffray.cluster.api.bodies import GenerationBody
from diffray.cluster.api.errors import Json
from diffray.cluster.api.fields import StrictModel
from diffray.cluster.api.noop_fields import is_recognized
from diffray.cluster.api.openapi import BODIES
from diffray.cluster.api.operations import OPERATED
from diffray.cluster.api.served import Answering
from diffray.components.spelling import did_you_mean

_MOST_NAMED: Final = 10  # as the header with the warnings has to stay short
# A field of one API means something to its clients at the paths of the others too.
_FIELDS: Final = frozenset(
    name for path, kind in BODIES.items() if path not in OPERATED for name in kind.model_fields
)


def without_unknown(given: object, kind: type[StrictModel]) -> tuple[object, list[str]]:
    """Return a body without unknown fields, and a warning for each of them."""
    if not isinstance(given, dict):
        return given, []
    ignored = [name for name in given if name not in _FIELDS and not is_recognized(name)]
    gone = {*ignored}
    warnings = [  # ASCII, for the header
        f"the unknown field {name[:64]!a} is ignored{did_you_mean(name, kind.model_fields)}"
        for name in ignored[:_MOST_NAMED]
    ]
    if len(ignored) > _MOST_NAMED:
        warnings.append(f"other unknown fields that are ignored: {len(ignored) - _MOST_NAMED}")
    return {name: given[name] for name in given if name not in gone}, warnings


def with_warnings(answer: Json, warnings: list[str]) -> Json:
    if not warnings:
        return answer
    return answer | {"warnings": [*warnings, *answer.get("warnings", [])]}


@dataclass(frozen=True, slots=True)
class WithWarnings:
    """A service whose answers, or their first chunks, have these warnings besides their own."""

    service: Answering
    warnings: list[str]

    async def whole(self, kind: type[GenerationBody], given: object) -> Json:
        return with_warnings(await self.service.whole(kind, given), self.warnings)

    async def stream(self, kind: type[GenerationBody], given: object) -> AsyncGenerator[Json, None]:
        async with aclosing(self.service.stream(kind, given)) as chunks:
            warnings = self.warnings
            async for chunk in chunks:
                yield with_warnings(chunk, warnings)
                warnings = []
