"""Unsupported fields of OpenAI and vLLM: only values without effect are accepted."""

import json
from collections.abc import Iterable, Mapping
from typing import Any, Final

from diffray.cluster.api.errors import invalid, unsupported
from diffray.components.config import did_you_mean
from diffray.components.policy import IN_DIFFUSION

# The neutral values; the first is the one to recommend. Null is neutral for all.
_NEUTRAL: Final[dict[str, tuple[Any, ...]]] = {
    "chat_template_content_format": ("auto", "string"),
    "detokenize": (True,),
    "documents": ([],),
    "early_stopping": (False,),
    "echo": (False,),
    "frequency_penalty": (0,),
    "function_call": ("none",),
    "include_reasoning": (True,),
    "length_penalty": (1,),
    "logits_processors": ([],),
    "min_p": (0,),
    "modalities": (["text"],),
    "presence_penalty": (0,),
    "reasoning_effort": ("none",),
    "repetition_penalty": (1,),
    "return_tokens_as_token_ids": (False,),
    "spaces_between_special_tokens": (True,),
    "stream_interval": (1,),
    "use_beam_search": (False,),
    "verbosity": ("medium",),
}
_UNSUPPORTED: Final = (
    *("audio", "chat_template", "functions", "guided_grammar", "prediction"),
    *("prompt_logprobs", "suffix", "truncate_prompt_tokens", "web_search_options"),
)


def refuse_unless_neutral(
    name: str, value: Any, body: Mapping[str, Any], known: Iterable[str]
) -> None:
    """Accept a known field if its value is neutral; refuse unknown fields."""
    if name == "best_of":
        if not _same(value, body.get("n", 1)):
            raise unsupported(name, "send n, or leave it out")
        return
    if name not in _NEUTRAL and name not in _UNSUPPORTED:
        what = f"Unrecognized request argument supplied: {name[:100]}"
        if name in IN_DIFFUSION:
            raise invalid(f"{what}; {IN_DIFFUSION[name]}", name)
        raise invalid(f"{what}{did_you_mean(name, known)}", name[:100])
    allowed = _NEUTRAL.get(name, ())
    if not any(_same(value, neutral) for neutral in allowed):
        instead = f" or send {json.dumps(allowed[0])}" if allowed else ""
        raise unsupported(name, f"leave it out{instead}")


def _same(given: Any, neutral: Any) -> bool:
    """Return whether two values are equal in JSON, where true is not 1."""
    return given == neutral and isinstance(given, bool) == isinstance(neutral, bool)
