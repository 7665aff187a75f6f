"""Fields of OpenAI, Anthropic and vLLM that only have values without effect here."""

import json
from collections.abc import Iterable, Mapping
from typing import Any, Final

from diffray.cluster.api.errors import invalid, unsupported
from diffray.components.params import NO_PROMPT_LOGPROBS
from diffray.components.policy import IN_DIFFUSION
from diffray.components.spelling import did_you_mean

# The neutral values, of which the first is recommended, or a type, if no value can change a token.
# Null is neutral for all.
_NEUTRAL: Final[dict[str, tuple[Any, ...] | type]] = {
    "background": (False,),
    "chat_template_content_format": ("auto", "string"),
    "context_management": ([],),
    "detokenize": (True,),
    "documents": ([],),
    "early_stopping": bool,  # like length_penalty, for beam search only
    "echo": (False,),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "guided_decoding_backend": str,
    "include_reasoning": bool,
    "inference_geo": str,
    "length_penalty": float,
    "logits_processors": ([],),
    "mcp_servers": ([],),
    "mm_processor_kwargs": ({},),
    "modalities": (["text"],),
    "prediction": dict,  # makes OpenAI's models faster
    "reasoning": ({"effort": "none"}, {}),
    "reasoning_effort": str,  # except in conversations, whose template gets it
    "return_tokens_as_token_ids": (False,),
    "spaces_between_special_tokens": (True,),
    "speed": ("standard", "fast"),
    "stream_interval": (1,),
    "thinking": ({"type": "disabled"},),
    "truncation": ("disabled",),
    "use_beam_search": (False,),
    "verbosity": ("medium", "low", "high"),
    "vllm_xargs": ({},),
}
_KINDS: Final = {bool: "boolean", dict: "object", float: "number", str: "string"}  # in JSON
_UNSUPPORTED: Final = (
    *("audio", "chat_template", "container", "guided_whitespace_pattern", "moderation"),
    *("prompt_embeds", "suffix", "thinking_token_budget", "truncate_prompt_tokens"),
    *("truncation_side", "web_search_options"),
)
_ADAPTERS: Final = ("adapter", "lora", "lora_name", "lora_path", "lora_request")
_STORED: Final = ("conversation", "previous_response_id", "thread")
_KNOWN: Final = frozenset(
    (*_NEUTRAL, *_UNSUPPORTED, *_ADAPTERS, *_STORED, *IN_DIFFUSION, "best_of", "prompt_logprobs")
)


def is_recognized(name: str) -> bool:
    """Return whether an unsupported field has a meaning elsewhere, so it must not be ignored."""
    return name in _KNOWN


def noop_schemas() -> dict[str, dict[str, Any]]:
    """Return the JSON schema of the values that are accepted, for each field that has some."""
    return {
        name: {"type": _KINDS[allowed]} if isinstance(allowed, type) else {"enum": [*allowed]}
        for name, allowed in _NEUTRAL.items()
    }


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
    if isinstance(allowed, type):
        if type(value) is not allowed and (type(value), allowed) != (int, float):
            raise invalid(f"{name} must be of the type {_KINDS[allowed]}; leave it out", name)
        return
    if not any(_same(value, neutral) for neutral in allowed):
        instead = f" or send {json.dumps(allowed[0])}" if allowed else ""
        raise unsupported(name, f"leave it out{instead}")


def _same(given: Any, neutral: Any) -> bool:
    """Return whether two values are equal in JSON, where true is not 1."""
    return given == neutral and isinstance(given, bool) == isinstance(neutral, bool)
