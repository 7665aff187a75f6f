"""Unsupported fields of OpenAI and vLLM: only values without effect are accepted."""

import json
from collections.abc import Iterable, Mapping
from typing import Any, Final

from diffray.cluster.api.errors import invalid, unsupported
from diffray.components.params import NO_PROMPT_LOGPROBS
from diffray.components.policy import IN_DIFFUSION
from diffray.components.spelling import did_you_mean

# The neutral values; the first is the one to recommend. Null is neutral for all.
_NEUTRAL: Final[dict[str, tuple[Any, ...]]] = {
    "background": (False,),
    "chat_template_content_format": ("auto", "string"),
    "context_management": ([],),
    "detokenize": (True,),
    "documents": ([],),
    "early_stopping": (False,),
    "echo": (False,),
    "function_call": ("none",),
    "include_reasoning": (True,),
    "length_penalty": (1,),
    "logits_processors": ([],),
    "mcp_servers": ([],),
    "modalities": (["text"],),
    "reasoning": ({"effort": "none"}, {}),
    "reasoning_effort": ("none",),
    "return_tokens_as_token_ids": (False,),
    "spaces_between_special_tokens": (True,),
    "speed": ("standard",),
    "stream_interval": (1,),
    "thinking": ({"type": "disabled"},),
    "truncation": ("disabled",),
    "use_beam_search": (False,),
    "verbosity": ("medium",),
}
_UNSUPPORTED: Final = (
    *("audio", "chat_template", "container", "functions", "moderation"),
    *("prediction", "suffix", "truncate_prompt_tokens", "web_search_options"),
)
_ADAPTERS: Final = ("adapter", "lora", "lora_name", "lora_path", "lora_request")
_STORED: Final = ("conversation", "previous_response_id", "thread")


def refuse_unless_neutral(
    name: str, value: Any, body: Mapping[str, Any], known: Iterable[str]
) -> None:
    """Accept a known field if its value is neutral; refuse unknown fields."""
    if name == "best_of":
        if not _same(value, body.get("n", 1)):
            raise unsupported(name, "send n, or leave it out")
        return
    if name in _STORED:
        raise unsupported(name, "no answer is stored, so send the whole conversation")
    if name not in _NEUTRAL and name not in _UNSUPPORTED:
        what = f"Unrecognized request argument supplied: {name[:100]}"
        if name == "prompt_logprobs":
            raise unsupported(name, NO_PROMPT_LOGPROBS)
        if name in _ADAPTERS:
            raise invalid(f"{what}; send the adapter's name as model", name)
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
