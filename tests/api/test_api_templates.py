"""Chat templates see what clients send, and one that is wrong is refused in one sentence."""

import asyncio
from collections.abc import Iterator
from contextlib import closing, contextmanager
from typing import Any

import pytest

from diffray.cluster.api.anthropic import Messages
from diffray.cluster.api.errors import ApiError
from diffray.cluster.api.responses import Responses
from diffray.cluster.api.service import Service
from tests.helpers.byte_tokenizer import byte_tokenizer
from tests.helpers.recorder import Recorder

CALLS = (
    "{% if tools %}{{ tools | tojson }}{% endif %}{% for m in messages %}<{{ m.role }}>"
    "{{ m.content }}{% for c in m.tool_calls %}{{ c.function.name }}"
    "({{ c.function.arguments.a }}){% endfor %}{% endfor %}"
)
# Over a service, and equal to what transformers makes of them.
CALL: dict[str, Any] = {"name": "add", "arguments": '{"a": 1}'}
TOOLS: list[Any] = [{"type": "function", "function": {"name": "add"}}]
CALLING = {"role": "assistant", "content": None}
HISTORY: list[dict[str, Any]] = [
    {"role": "user", "content": "1?"},
    CALLING | {"tool_calls": [{"type": "function", "id": "c", "function": CALL}]},
    {"role": "tool", "content": "2", "tool_call_id": "c"},
]


@contextmanager
def service(template: str) -> Iterator[Service]:
    tokenizer = byte_tokenizer()
    tokenizer.fast.chat_template = template
    with closing(Service(Recorder(), tokenizer, ["some"])) as service:
        yield service


def test_tools_and_their_history_reach_the_template() -> None:
    body = {"messages": HISTORY, "tools": TOOLS, "return_token_ids": True, "max_tokens": 64}
    with service(CALLS) as serving:
        made = [
            asyncio.run(serving.chat(body | {"tool_choice": each})) for each in ("auto", "none")
        ]
    assert serving.tokenizer is not None
    text, untooled = (
        serving.tokenizer.decode(each["prompt_token_ids"], skip_special_tokens=False)
        for each in made
    )
    assert untooled == "<user>1?<assistant>add(1)<tool>2" != text and text.endswith(untooled)
    called = {"id": "c", "function": {"name": "add", "arguments": {"a": 1}}}
    history = [HISTORY[0], HISTORY[1] | {"content": "", "tool_calls": [called]}, HISTORY[2]]
    fast = serving.tokenizer.fast
    assert text == fast.apply_chat_template(history, tools=TOOLS, tokenize=False)


def test_the_effort_of_each_api_reaches_the_template() -> None:
    asked: dict[str, Any] = {"messages": HISTORY[:1]}
    chats: list[Any] = [
        asked | {"reasoning_effort": "high"},
        Responses({"input": "1?", "reasoning": {"effort": "high"}}).chat,
        Messages(asked | {"output_config": {"effort": "high"}}).chat,
    ]
    with service("a{{ reasoning_effort }}") as serving:
        for chat, text in [(asked, "a"), *((each, "ahigh") for each in chats)]:
            made = asyncio.run(serving.chat(chat | {"return_token_ids": True}))
            assert serving.tokenizer is not None
            assert serving.tokenizer.decode(made["prompt_token_ids"]) == text


@pytest.mark.parametrize(
    ("template", "words"),
    [
        ("{% for m in messages %}", r"\(line 1 of the template\)$"),
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate$"),
        ("{{ ().__class__.__base__ }}", "unsafe"),
        ("{{ 'a' * 2**25 }}", "33554432 characters"),
    ],
)
def test_a_template_that_is_wrong_is_one_sentence(template: str, words: str) -> None:
    with service(template) as serving:
        with pytest.raises(ApiError, match=f"the chat template refuses this: .*{words}") as refused:
            asyncio.run(serving.chat({"messages": HISTORY[:1]}))
        assert refused.value.status == 400
