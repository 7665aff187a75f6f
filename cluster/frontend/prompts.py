"""Reads prompts and parameters in all accepted forms; refuses others."""

from collections.abc import Mapping
from collections.abc import Sequence as Items
from operator import index
from typing import Any, Final, Protocol

from diffray.cluster.frontend.image_files import Picture, from_data_url
from diffray.cluster.frontend.text import Messages
from diffray.components.config import InvalidField
from diffray.components.grammar.structured import StructuredOutputs
from diffray.components.model_spec import ModelSpec
from diffray.components.params import SamplingParams
from diffray.components.policy import DiffusionParams, Policy
from diffray.components.spelling import did_you_mean


class Array(Protocol):
    """A tensor of torch, or an array of numpy."""

    def tolist(self) -> Any: ...


# The mapping is what a tokenizer returns, with `input_ids`, or vLLM's with `prompt` or
# `prompt_token_ids`.
Prompt = str | Items[int] | Array | Mapping[str, Any]

_NO_PROMPT: Final = "a prompt is a text or a list of token ids"
_PARTS: Final = (
    '{"type": "text", "text": ...}, {"type": "image", "image": path, bytes or Pillow\'s} and '
    '{"type": "image_url", "image_url": {"url": "data:..."}}'
)


def as_list(prompts: object) -> list[str | tuple[int, ...]]:
    """Return a list of prompts: a text or a flat list of ids is one, a matrix has one per row."""
    if isinstance(prompts := _plain(prompts), str):
        return [prompts]
    if not isinstance(prompts, Items):
        raise ValueError(f"{_NO_PROMPT}, or several (given: {prompts!r:.200})")
    several = [_plain(each) for each in prompts]
    if several and all(isinstance(each, int) for each in several):
        return [_as_ids(several)]
    return [each if isinstance(each, str) else _as_ids(each) for each in several]


def as_one(prompt: object) -> str | tuple[int, ...]:
    """Return a single prompt."""
    if isinstance(prompt, Items) and not prompt:
        return ()
    several = as_list(prompt)
    if len(several) != 1:
        raise ValueError(f"this takes one prompt (given: {len(several)}); generate takes several")
    return several[0]


def _plain(given: object) -> Any:
    """Return the contents of a tensor, an array or a tokenizer's mapping as lists."""
    if isinstance(given, Mapping):
        return _of_mapping(given)
    tolist = getattr(given, "tolist", None)  # torch and numpy have it
    return tolist() if callable(tolist) else given


def _of_mapping(given: Mapping[str, Any]) -> Any:
    if "role" in given:
        raise ValueError("generate takes prompts; give messages to chat")
    for name in ("input_ids", "prompt_token_ids", "prompt"):
        if name in given:
            break
    else:
        raise ValueError(
            f"{_NO_PROMPT}, or a mapping with input_ids, prompt_token_ids or prompt "
            f"(given: {', '.join(map(str, given)):.200})"
        )
    ids = _plain(given[name])
    mask = _plain(given.get("attention_mask")) if name == "input_ids" else None
    if mask is None:
        return ids
    if ids and isinstance(mask[0], Items):
        return [_kept(*row) for row in zip(ids, mask, strict=True)]
    return _kept(ids, mask)


def _kept(ids: Items[int], mask: Items[int]) -> list[int]:
    """Return a row without its padding."""
    return [token for token, is_text in zip(ids, mask, strict=True) if is_text]


def _as_ids(prompt: object) -> tuple[int, ...]:
    """Return a prompt's token ids; a matrix of one row is one prompt."""
    if isinstance(prompt, Items) and len(prompt) == 1 and isinstance(prompt[0], list):
        prompt = prompt[0]
    try:
        if isinstance(prompt, str | bytes) or not isinstance(prompt, Items):
            raise TypeError
        if any(isinstance(token, bool) for token in prompt):
            raise TypeError
        return tuple(map(index, prompt))
    except TypeError:
        raise ValueError(f"{_NO_PROMPT} (given: {prompt!r:.200})") from None


def is_conversation(prompt: object) -> bool:
    """Whether this is a list of messages, or of several such lists."""
    while isinstance(prompt, list | tuple) and prompt:
        prompt = prompt[0]
    return isinstance(prompt, Mapping) and "role" in prompt


def as_conversations(messages: object) -> list[Messages]:
    """Return a list of conversations; one text or one list of messages is one conversation."""
    if isinstance(messages, str) or not isinstance(messages, Items):
        return [as_messages(messages)]
    is_one = messages and isinstance(messages[0], Mapping)
    return [as_messages(messages)] if is_one else [as_messages(each) for each in messages]


def as_messages(messages: object) -> Messages:
    """Return one conversation, each message with a role, and a text or parts.

    A text is a message of the user.
    """
    if isinstance(messages, str):
        return [{"role": "user", "content": messages}]
    if not isinstance(messages, Items):
        raise ValueError(
            f"a conversation is a list of {{'role': ..., 'content': ...}} (given: {messages!r:.99})"
        )
    for message in messages:
        if not _is_message(message):
            raise ValueError(
                "a message needs a 'role' and a 'content', which is a text or a list of "
                f"{_PARTS} (given: {message!r:.200})"
            )
    return messages


def _is_message(message: object) -> bool:
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        return False
    content = message.get("content")
    parts = isinstance(content, list) and bool(content) and all(map(_is_part, content))
    return isinstance(content, str) or parts


def _is_part(part: object) -> bool:
    if not isinstance(part, Mapping):
        return False
    match part.get("type"):
        case "text":
            return isinstance(part.get("text"), str)
        case "image":
            return part.get("image") is not None
        case "image_url":
            given = part.get("image_url")
            return isinstance(given, Mapping) and isinstance(given.get("url"), str)
    return False


def content_of(content: str | Items[Mapping[str, Any]]) -> str | list[dict[str, Any]]:
    """Return a message's content as templates expect it: one text, or parts if it has images."""
    if isinstance(content, str):
        return content
    if all(part["type"] == "text" for part in content):
        return "\n".join(part["text"] for part in content)
    return [
        {"type": "text", "text": part["text"]} if part["type"] == "text" else {"type": "image"}
        for part in content
    ]


def pictures_of(messages: Messages) -> list[Picture]:
    """Return the images of a conversation, in order."""
    found: list[Picture] = []
    for message in messages:
        for part in message["content"] if isinstance(message["content"], list) else ():
            if part["type"] == "image":
                found.append(part["image"])
            elif part["type"] == "image_url":
                found.append(from_data_url(part["image_url"]["url"]))
    return found


def as_params(
    method: str, params: object, options: Mapping[str, Any], count: int
) -> list[SamplingParams]:
    """Return parameters for each prompt, given as SamplingParams or as keywords."""
    if options:
        params = _of_options(method, params, options)
    if params is None:
        return [SamplingParams()] * count
    if isinstance(params, SamplingParams):
        return [params] * count
    if not isinstance(params, Items) or not all(isinstance(p, SamplingParams) for p in params):
        raise ValueError(
            f"sampling_params is one SamplingParams, or a list of them (given: {params!r:.200})"
        )
    if len(params) != count:
        raise ValueError(f"{len(params)} SamplingParams for {count} prompts; give one, or one each")
    return list(params)


def _of_options(method: str, params: object, options: Mapping[str, Any]) -> SamplingParams:
    known = SamplingParams.model_fields
    for name in options:
        if name not in known:
            near = did_you_mean(name, ["sampling_params", "use_tqdm", *known])
            hint = near or "; it takes sampling_params, or its fields, such as max_tokens=64"
            if name in SamplingParams.elsewhere:
                hint = f"; {SamplingParams.elsewhere[name]}"
            raise TypeError(f"{method} takes no {name!r}{hint}")
    if params is not None:
        raise ValueError(
            f"{method} got both sampling_params and {', '.join(options)}; write all of them "
            "in SamplingParams(...), or all as keywords"
        )
    return SamplingParams(**options)


def check_default(default: DiffusionParams, spec: ModelSpec) -> None:
    """Refuse default diffusion parameters that do not fit the model."""
    try:
        Policy.resolve(DiffusionParams().over(default), spec)
    except InvalidField as error:
        raise ValueError(f"diffusion: the default does not fit: {error}") from None


def as_diffusion(given: DiffusionParams | dict[str, Any] | None) -> DiffusionParams:
    if isinstance(given, DiffusionParams):
        return given
    return DiffusionParams(**(given or {}))


def on_pinned_canvas(params: SamplingParams, outputs: dict[str, Any]) -> SamplingParams:
    """Return the parameters of a request that fills in structured outputs on a pinned canvas."""
    return params.model_copy(
        update={
            "structured_outputs": StructuredOutputs(**outputs),
            "diffusion": params.diffusion.model_copy(update={"canvas": "pinned"}),
        }
    )
