"""Defaults of a request: the server's, then the checkpoint's, then diffray's.

diffray's are OpenAI's except for the temperature, which is 0: the models' own samplers take the
most probable tokens, and many tokens sampled at once at temperature 1 rarely fit together.
"""

import logging
from pathlib import Path
from typing import TYPE_CHECKING, Final, Self

from pydantic import ValidationError, create_model

from diffray.components.checkpoints.folder import read_json
from diffray.components.config import Config, explain, not_given
from diffray.components.params import SamplingParams

log = logging.getLogger(__name__)

# Our name -> generation_config.json's
_READ: Final = {
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "repetition_penalty": "repetition_penalty",
    "max_tokens": "max_new_tokens",
}
_NOT_HONOURED: Final = {"no_repeat_ngram_size": 0}  # it needs blocks of one position


if TYPE_CHECKING:
    _Defaults = Config
else:
    _FIELDS = not_given(SamplingParams, _READ, " Default: the checkpoint's, else {default}.")
    _TOKENS = " Default: the checkpoint's, else 16 for completions and up to 512 for chats."
    _FIELDS |= not_given(SamplingParams, ["max_tokens"], _TOKENS)
    _Defaults = create_model("_Defaults", __base__=Config, **_FIELDS)


class GenerationDefaults(_Defaults):
    """Defaults of a server; a request's own values come first."""

    if TYPE_CHECKING:
        max_tokens: int | None
        temperature: float | None
        top_k: int | None

        def __init__(self, **given: float | None) -> None: ...

    def over(self, other: Self) -> Self:
        """Return these defaults, with missing ones taken from `other`."""
        return other.model_copy(update=self.model_dump(exclude_none=True))


def read_generation_defaults(folder: Path) -> GenerationDefaults:
    """Return the defaults in a checkpoint's generation_config.json, if it has one."""
    file = folder / "generation_config.json"
    if not file.is_file():
        return GenerationDefaults()
    found = read_json(file)
    for name, neutral in _NOT_HONOURED.items():
        if found.get(name, neutral) not in (neutral, None):
            log.warning("%s: %s is not supported, so it has no effect", file, name)
    given = {ours: found[theirs] for ours, theirs in _READ.items() if theirs in found}
    if found.get("do_sample") is False:
        given["temperature"] = 0.0
    try:
        return GenerationDefaults.model_validate(given)
    except ValidationError as error:
        reason = explain(error, _READ)
        raise ValueError(f"{file}: {reason}; correct it or remove it") from None
