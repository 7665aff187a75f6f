"""Calls of functions: valid by construction, whole and in streams."""

import asyncio
import json
import random
import re
from collections.abc import Iterator
from typing import Any

import pytest

from diffray.cluster.api.bodies import ChatBody
from diffray.cluster.api.errors import ApiError
from diffray.cluster.api.service import Service
from diffray.components.grammar.automaton import Automaton
from diffray.components.grammar.bad_words import avoiding_within
from diffray.components.grammar.compile import compile_text
from diffray.components.grammar.tool_calls import NO_ARGUMENTS, OPEN, CallParser, ToolCalls
from tests.helpers.byte_tokenizer import TOKENIZER
from tests.helpers.recorder import Recorder

WEATHER = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 10}, "unit": {"enum": ["C", "F"]}},
    "required": ["city", "unit"],
}
TOOLS: list[dict[str, Any]] = [
    {"type": "function", "function": {"name": "get_weather", "parameters": WEATHER}},
    {"type": "function", "function": {"name": "now"}},
]
CHAT: dict[str, Any] = {
    "messages": [{"role": "user", "content": "How warm is it in Rome?"}],
    "max_tokens": 96,
    "tools": TOOLS,
}
NOW = {"type": "function", "function": {"name": "now"}}


def asked(service: Service, *bodies: dict[str, Any]) -> list[dict[str, Any]]:
    async def ask() -> list[dict[str, Any]]:
        answers = [await service.chat(CHAT | body) for body in bodies]
        return [choice for answer in answers for choice in answer["choices"]]

    return asyncio.run(ask())


def test_calls_are_made_as_asked(demo: Service) -> None:
    bodies: list[dict[str, Any]] = [
        {"tool_choice": "required"},
        {"tool_choice": "required", "temperature": 1, "seed": 1, "n": 2},
        {"tool_choice": NOW},
        {"tool_choice": "none"},
        {},
    ]
    required, *drawn, named, none, auto = asked(demo, *bodies)
    for choice in (required, *drawn):
        assert choice["finish_reason"] == "tool_calls" and choice["message"]["content"] is None
        for call in choice["message"]["tool_calls"]:
            arguments = json.loads(call["function"]["arguments"])
            if call["function"]["name"] == "get_weather":
                assert arguments.keys() == {"city", "unit"} and arguments["unit"] in ("C", "F")
            else:
                assert arguments == {} and call["function"]["name"] == "now"
    ids = [call["id"] for each in drawn for call in each["message"]["tool_calls"]]
    assert len({*ids}) == len(ids) >= 2
    assert named["finish_reason"] == "stop"
    (call,) = named["message"]["tool_calls"]
    assert call["function"] == {"name": "now", "arguments": "{}"}
    assert none["finish_reason"] == "stop" and "tool_calls" not in none["message"]
    assert none["message"]["content"] and CALL[:11] not in none["message"]["content"]
    (call,) = auto["message"]["tool_calls"]
    assert auto["finish_reason"] == "tool_calls" and call["function"]["name"] == "get_weather"
    assert json.loads(call["function"]["arguments"])["city"] == "Rome"


ROME = '{"city":"Rome","unit":"C"}'
CALL = f'<tool_call>\n{{"name": "get_weather", "arguments": {ROME}}}\n</tool_call>'
GREETING = {"messages": [{"role": "user", "content": "Hi."}]}


@pytest.fixture(scope="module")
def recorded() -> Iterator[tuple[Recorder, Service]]:
    engine = Recorder(reason="stop")
    service = Service(engine, TOKENIZER, ["some"])
    yield engine, service
    service.close()


@pytest.mark.parametrize("choice", [{}, {"tool_choice": "auto"}])
@pytest.mark.parametrize(
    ("said", "content", "count"),
    [(CALL, None, 1), (f"So: {CALL}", "So: ", 1), (f"{CALL}\n{CALL}", None, 2), ("No.", "No.", 0)],
)
async def test_a_model_that_may_call_does(
    recorded: tuple[Recorder, Service],
    choice: dict[str, Any],
    said: str,
    content: str | None,
    count: int,
) -> None:
    """Whole and in a stream; the engine is asked for texts that may have a call or none."""
    engine, service = recorded
    engine.ids = TOKENIZER.encode(said)
    body = CHAT | GREETING | choice
    whole = (await service.chat(body))["choices"][0]
    stream = service.stream(ChatBody, body | {"stream": True})
    pieces = [chunk["choices"][0] async for chunk in stream]
    reason = "tool_calls" if count else "stop"
    assert whole["finish_reason"] == pieces[-1]["finish_reason"] == reason
    assert whole["message"]["content"] == content
    calls = whole["message"].get("tool_calls", [])
    wanted = {"name": "get_weather", "arguments": ROME}
    assert [each["function"] for each in calls] == [wanted] * count
    assert "".join(each["delta"].get("content") or "" for each in pieces) == (content or "")
    parts = [part for each in pieces for part in each["delta"].get("tool_calls", [])]
    for index in range(count):
        own = [part for part in parts if part["index"] == index]
        assert [part["function"]["name"] for part in own if "id" in part] == ["get_weather"]
        assert "".join(part["function"]["arguments"] for part in own) == ROME
    assert len({part["index"] for part in parts}) == count
    automaton = Automaton.from_bytes(engine.requests[-1][0].grammar)
    for text in (said, CALL, "No.", f"So: {CALL}\n{CALL}"):
        state = automaton.follow(0, TOKENIZER.encode(text))
        assert automaton.distance_Q[state] == (OPEN in text), "it may end there, or be cut"
    rude = (tuple(TOKENIZER.encode("zz")),)
    assert avoiding_within(engine.requests[-1][0].grammar, rude).shortest == 0
    assert (
        automaton.without(frozenset(TOKENIZER.encode("~"))).distance_Q == automaton.distance_Q
    ).all()


@pytest.mark.parametrize(
    ("body", "field", "words"),
    [
        ({"tools": [], "tool_choice": "auto"}, "tool_choice", "needs tools"),
        ({"tool_choice": "sometimes"}, "tool_choice", "."),
        ({"tools": TOOLS + TOOLS[:1]}, "tools", "two tools have the same name"),
        ({"tool_choice": {"function": {"name": "later"}}}, "tool_choice", "no tool .* 'later'"),
        ({"response_format": {"type": "json_object"}}, "response_format", "exclude each other"),
        ({"tool_choice": "required", "max_tokens": 4}, "max_tokens", "shortest text takes"),
    ],
)
def test_refusals_name_a_field(demo: Service, body: dict[str, Any], field: str, words: str) -> None:
    with pytest.raises(ApiError, match=words) as refused:
        asked(demo, body)
    assert refused.value.status == 400 and str(refused.value.param).startswith(field)


def test_any_text_without_a_call_may_come_before_one() -> None:
    calls = ToolCalls(functions={"now": dict(NO_ARGUMENTS)}, text=True)
    pattern, draw = re.compile(calls.pattern), random.Random(1)
    for _ in range(20_000):
        text = "".join(draw.choice("<tool_call>x ") for _ in range(draw.randint(0, 14)))
        assert bool(pattern.fullmatch(text)) == (OPEN not in text), text
    call = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
    for text in (call, f"So: {call}", f"<{call}\n{call}"):
        assert pattern.fullmatch(text)
    assert not pattern.fullmatch(f"{call} and more")


def test_pieces_do_not_change_what_is_found() -> None:
    arguments = '{"city":"}\\n</tool","unit":"C"}'
    call = f'<tool_call>\n{{"name": "get_weather", "arguments": {arguments}}}\n</tool_call>'
    text = f"It is <b>warm</b> <tool_{call}\n{call}"
    draw = random.Random(2)
    for _ in range(300):
        parser, rest, found = CallParser(), text, []
        while rest:
            length = draw.randint(1, 9)
            found += [*parser.feed(rest[:length])]
            rest = rest[length:]
        found += [*parser.end()]
        content = "".join(part.text for part in found if part.kind == "content")
        assert content == "It is <b>warm</b> <tool_"
        assert [part.text for part in found if part.kind == "name"] == ["get_weather"] * 2
        made = "".join(part.text for part in found if part.kind == "arguments")
        assert made == arguments * 2


@pytest.mark.parametrize("asked_for", [{}, {"temperature": 1, "seed": 2}])
def test_a_text_is_cut_by_its_limit(demo: Service, asked_for: dict[str, Any]) -> None:
    """It has as many tokens as without tools: no end is forced."""
    body = {"messages": [{"role": "user", "content": "What is 27 + 5?"}], "max_tokens": 2}
    whole, plain = asked(demo, body | asked_for, body | asked_for | {"tool_choice": "none"})
    assert whole["finish_reason"] == plain["finish_reason"] == "length"
    assert whole["message"]["content"] == plain["message"]["content"] != ""


def test_a_call_is_not_cut() -> None:
    calls = ToolCalls(functions={"now": dict(NO_ARGUMENTS)}, text=True)
    automaton = compile_text(calls.pattern, {bytes([n]): [n] for n in range(256)}, (256,), 257)
    call = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'

    def left(text: str) -> int:
        return int(automaton.distance_Q[automaton.follow(0, list(text.encode()))])

    assert [left(text) for text in ("", "So", "So <tool_call")] == [0, 0, 0]
    assert [left(call[:-n]) for n in (20, 4, 1)] == [21, 5, 2]
    assert left(call) == 1, "it ends"
