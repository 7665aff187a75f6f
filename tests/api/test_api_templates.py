"""Chat templates are a checkpoint's programs: one that is wrong, or never ends, harms no other."""

import asyncio
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from typing import Any

import pytest

from diffray.cluster.api.anthropic import Messages
from diffray.cluster.api.errors import ApiError
from diffray.cluster.api.responses import Responses
from diffray.cluster.api.service import Service
from diffray.cluster.api.templates import Templates
from tests.helpers.byte_tokenizer import byte_tokenizer
from tests.helpers.recorder import Recorder

CALLS = (
    "{% if tools %}{{ tools | tojson }}{% endif %}{% for m in messages %}<{{ m.role }}>"
    "{{ m.content }}{% for c in m.tool_calls %}{{ c.function.name }}"
    "({{ c.function.arguments.a }}){% endfor %}{% endfor %}"
)
BOMBS = {
    "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}": "longer than",
    "{{ 'a' * 10**10 }}": "of memory",
    "{% set n = namespace(x='a') %}{% for i in range(99) %}{% set n.x = n.x * 2 %}{% endfor %}": (
        "of memory|longer than"
    ),
    "{{ 'a' * 2**25 }}": "33554432 characters",
}


@pytest.fixture(scope="module")
def templates() -> Iterator[Templates]:
    made = Templates()
    yield made
    made.process.close()


def conversation(template: str) -> dict[str, Any]:
    return {"conversations": [[{"role": "user", "content": "hi"}]], "chat_template": template}


def rendered(templates: Templates, template: str) -> str:
    return asyncio.run(templates.render(conversation(template)))


@pytest.mark.slow
@pytest.mark.parametrize("template", BOMBS)
def test_a_bomb_is_refused_while_the_loop_goes_on(templates: Templates, template: str) -> None:
    rendered(templates, "")

    async def beside() -> tuple[int, float]:
        begin = time.monotonic()
        bomb, beats = asyncio.create_task(templates.render(conversation(template))), 0
        while not bomb.done():
            await asyncio.sleep(0.01)
            beats += 1
        with pytest.raises(ValueError, match=BOMBS[template]):
            bomb.result()
        return beats, time.monotonic() - begin

    beats, seconds = asyncio.run(beside())
    assert beats > seconds, "the loop turned at least once a second"
    assert rendered(templates, "{{ messages[0].content }}!") == "hi!"


def test_a_template_s_own_errors_are_passed_on(templates: Templates) -> None:
    for template, words in (
        ("{{ raise_exception('roles must alternate') }}", "^roles must alternate$"),
        ("a\n{% for m in messages %}", r"\(line 2 of the template\)$"),
        ("{{ ().__class__.__base__ }}", "unsafe"),
    ):
        with pytest.raises(ValueError, match=words):
            rendered(templates, template)


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
    body = {"messages": HISTORY, "tools": TOOLS, "return_token_ids": True, "tool_choice": "none"}
    with service(CALLS) as serving:
        made = asyncio.run(serving.chat(body))
    assert serving.tokenizer is not None
    text = serving.tokenizer.decode(made["prompt_token_ids"], skip_special_tokens=False)
    assert text.endswith("<user>1?<assistant>add(1)<tool>2")
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


def test_a_template_that_is_wrong_is_one_sentence() -> None:
    with service("{% for m in messages %}") as serving:
        with pytest.raises(ApiError, match=r"the chat template refuses this: .*line 1") as refused:
            asyncio.run(serving.chat({"messages": HISTORY[:1]}))
        assert refused.value.status == 400
