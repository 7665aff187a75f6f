"""The forms that prompts and parameters may take; others are refused."""

from collections.abc import Mapping
from collections.abc import Sequence as Items

from diffray.components.params import SamplingParams
from diffray.workers.text import Messages

Prompt = str | Items[int]


def as_list(prompts: object) -> list[Prompt]:
    """Return several prompts: a text or a flat list of ids is one."""
    if isinstance(prompts, str):
        return [prompts]
    if not isinstance(prompts, Items):
        raise ValueError(
            f"a prompt is a text or a list of token ids, or several (given: {prompts!r:.200})"
        )
    if prompts and all(isinstance(each, int) for each in prompts):
        return [as_ids(prompts)]
    return [each if isinstance(each, str) else as_ids(each) for each in prompts]


def as_ids(prompt: object) -> tuple[int, ...]:
    """Return a prompt's token ids."""
    if not isinstance(prompt, Items) or not all(type(token) is int for token in prompt):
        raise ValueError(f"a prompt is a text or a list of token ids (given: {prompt!r:.200})")
    return tuple(prompt)


def as_conversations(messages: object) -> list[Messages]:
    """Return several conversations: one list of messages is one."""
    if isinstance(messages, Items) and messages and isinstance(messages[0], Mapping):
        return [as_messages(messages)]
    if not isinstance(messages, Items) or isinstance(messages, str):
        raise ValueError(
            f"a conversation is a list of {{'role': ..., 'content': ...}} (given: {messages!r:.99})"
        )
    return [as_messages(each) for each in messages]


def as_messages(messages: object) -> Messages:
    """Return one conversation, each message with a role and a text."""
    if not isinstance(messages, Items) or isinstance(messages, str):
        raise ValueError(
            f"a conversation is a list of {{'role': ..., 'content': ...}} (given: {messages!r:.99})"
        )
    for message in messages:
        if not isinstance(message, Mapping) or not all(
            isinstance(message.get(key), str) for key in ("role", "content")
        ):
            raise ValueError(
                f"a message needs a 'role' and a 'content' text (given: {message!r:.200})"
            )
    return messages


def refuse_unknown(method: str, given: Mapping[str, object]) -> None:
    """Raise TypeError for a keyword that a method does not take."""
    for name in given:
        hint = "it takes sampling_params"
        if name in SamplingParams.model_fields:
            hint = f"write sampling_params=SamplingParams({name}=...)"
        raise TypeError(f"DiffusionLLM.{method} takes no {name!r}; {hint}")


def one_each(params: object, count: int) -> list[SamplingParams]:
    """Return one request's parameters for each prompt."""
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
