"""Defaults of a request: the server's, then the checkpoint's, then diffray's.

diffray's are OpenAI's except for the temperature, which is 0: the models' own samplers take the
most probable tokens, and many tokens sampled at once at temperature 1 rarely fit together.
"""

import logging
from pathlib import Path
from typing import Final, Self

from pydantic import Field, ValidationError

from diffray.components.checkpoints.weights import read_json
from diffray.components.config import Config, explain

log = logging.getLogger(__name__)

COMPLETION_TOKENS: Final = 16  # OpenAI's
# A chat without max_tokens gets what fits the context, but no more than this: with bidirectional
# attention the whole canvas is computed, however short the answer turns out to be.
CHAT_TOKENS: Final = 512

# generation_config.json's name -> ours
_READ: Final = {
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "max_new_tokens": "max_tokens",
}
_NOT_HONOURED: Final = {"repetition_penalty": 1.0, "min_p": 0.0, "no_repeat_ngram_size": 0}


class GenerationDefaults(Config):
    """None: not set."""

    max_tokens: int | None = Field(None, ge=1)
    temperature: float | None = Field(None, ge=0, le=100)
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: int | None = Field(None, ge=-1)

    def over(self, other: Self) -> Self:
        """Return these, with missing ones taken from `other`."""
        said = {n: v for n in type(self).model_fields if (v := getattr(self, n)) is not None}
        return other.model_copy(update=said)


def read_generation_defaults(folder: Path) -> GenerationDefaults:
    """Return the defaults in a checkpoint's generation_config.json, if it has one."""
    file = folder / "generation_config.json"
    if not file.is_file():
        return GenerationDefaults()
    found = read_json(file)
    for name, neutral in _NOT_HONOURED.items():
        if found.get(name, neutral) not in (neutral, None):
            log.warning("%s: %s is not supported, so it has no effect", file, name)
    said = {ours: found[theirs] for theirs, ours in _READ.items() if found.get(theirs) is not None}
    if found.get("do_sample") is False:
        said["temperature"] = 0.0
    try:
        return GenerationDefaults.model_validate(said)
    except ValidationError as error:
        reason = explain(error)
        for theirs, ours in _READ.items():
            reason = reason.replace(f"{ours}: ", f"{theirs}: ")
        raise ValueError(f"{file}: {reason}; correct it or remove it") from None
