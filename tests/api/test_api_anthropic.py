"""Anthropic's Messages API: the answers of chats in its shape, whole and as its events."""

import json
import re
from collections.abc import Iterator
from typing import Any

import httpx2
import pytest

from diffray.cluster.api.errors import bug
from diffray.cluster.api.service import Service
from diffray.cluster.api.settings import ApiSettings
from tests.helpers import api_server
from tests.helpers.api_server import serve

PATH, CHAT, COUNT = "/v1/messages", "/v1/chat/completions", "/v1/messages/count_tokens"
ASK = "Anna buys 3 pens for 4 dollars each. How much does she pay?"
QUESTION: list[Any] = [{"role": "user", "content": ASK}]
ASKED: dict[str, Any] = {"model": "demo", "max_tokens": 64, "messages": QUESTION}
CITY = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 8}},
    "required": ["city"],
}
TOOLS: list[Any] = [
    {"name": "get_weather", "description": "The weather.", "input_schema": CITY},
    {"name": "now", "input_schema": {}, "cache_control": {"type": "ephemeral"}},
]
CALLED: dict[str, Any] = ASKED | {"tools": TOOLS, "tool_choice": {"type": "any"}, "max_tokens": 96}
SMALL_BLOCKS = {"diffusion": {"block_length": 8}}
USE = {"type": "tool_use", "id": "toolu_1", "name": "now", "input": {"zone": "UTC"}}
RESULT = {"type": "tool_result", "tool_use_id": "toolu_1"}
IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AAAA"}}
NOT = {"type": "json_schema", "schema": {"not": {}}}
FILE = {"type": "image", "source": {"type": "file", "file_id": "f"}}


@pytest.fixture(scope="module")
def http(demo_url: str) -> Iterator[httpx2.Client]:
    with httpx2.Client(base_url=demo_url, timeout=60) as http:
        yield http


def said(http: httpx2.Client, body: dict[str, Any], path: str = PATH) -> Any:
    answer = http.post(path, json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()


def events(http: httpx2.Client, body: dict[str, Any]) -> list[Any]:
    answer = http.post(PATH, json=body | {"stream": True})
    assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
    return api_server.events(answer.text)


def refusal(answer: httpx2.Response, status: int) -> str:
    """Return what kind of error it is and its message, in Anthropic's shape."""
    assert answer.status_code == status, answer.text
    body = answer.json()
    assert body.keys() == {"type", "error"} and body["type"] == "error"
    assert body["error"].keys() == {"type", "message"}
    return "{type}: {message}".format(**body["error"])


def test_an_answer_is_the_chats(http: httpx2.Client) -> None:
    system = {"role": "system", "content": "Be brief."}
    sampling = {"temperature": 0.9, "seed": 3, "top_k": 20, **SMALL_BLOCKS}
    chat = said(http, ASKED | sampling | {"messages": [system, *QUESTION]}, CHAT)
    notes = {"metadata": {"user_id": "u"}, "service_tier": "auto", "thinking": {"type": "disabled"}}
    for brief in ("Be brief.", [{"type": "text", "text": "Be brief."}]):
        made = said(http, ASKED | sampling | notes | {"system": brief})
        assert made.pop("id").startswith("msg_")
        usage = made.pop("usage")
        assert made == {
            "type": "message", "role": "assistant", "model": "demo",
            "content": [{"type": "text", "text": chat["choices"][0]["message"]["content"]}],
            "stop_reason": "end_turn", "stop_sequence": None, "diffusion": chat["diffusion"],
        }  # fmt: skip
        cached = usage["cache_read_input_tokens"]
        assert usage["input_tokens"] + cached == chat["usage"]["prompt_tokens"]
        assert usage["output_tokens"] == chat["usage"]["completion_tokens"]


def test_the_events_of_a_text(http: httpx2.Client) -> None:
    whole = said(http, ASKED | SMALL_BLOCKS)
    start, ping, begin, *deltas, stop, end, last = events(http, ASKED | SMALL_BLOCKS)
    message = start.pop("message")
    assert start == {"type": "message_start"} and ping == {"type": "ping"}
    assert (message["content"], message["stop_reason"]) == ([], None)
    assert message["usage"] == whole["usage"] | {"output_tokens": 0}
    block = {"type": "text", "text": ""}
    assert begin == {"type": "content_block_start", "index": 0, "content_block": block}
    for each in deltas:
        assert (each["type"], each["index"]) == ("content_block_delta", 0)
        assert each["delta"].keys() == {"type", "text"} and each["delta"]["type"] == "text_delta"
    text = "".join(each["delta"]["text"] for each in deltas)
    assert len(deltas) > 1 and [{"type": "text", "text": text}] == whole["content"]
    assert stop == {"type": "content_block_stop", "index": 0}
    reason = {"stop_reason": "end_turn", "stop_sequence": None}
    assert (end["type"], end["delta"], end["usage"]) == ("message_delta", reason, whole["usage"])
    assert last == {"type": "message_stop"}


def test_the_events_of_calls(http: httpx2.Client) -> None:
    whole = said(http, CALLED | SMALL_BLOCKS)
    assert whole["stop_reason"] == "tool_use"
    _, _, *middle, end, _ = events(http, CALLED | SMALL_BLOCKS)
    assert end["delta"]["stop_reason"] == "tool_use"
    found = iter(middle)
    ids = set()
    for index, block in enumerate(whole["content"]):
        begin = next(found)
        assert (begin["type"], begin["index"]) == ("content_block_start", index)
        assert begin["content_block"]["id"].startswith("toolu_")
        ids.add(begin["content_block"]["id"])
        assert begin["content_block"] | {"id": ""} == block | {"id": "", "input": {}}
        text = ""
        while (event := next(found))["type"] == "content_block_delta":
            assert event["index"] == index and event["delta"]["type"] == "input_json_delta"
            text += event["delta"]["partial_json"]
        assert event == {"type": "content_block_stop", "index": index}
        assert json.loads(text) == block["input"]
    assert next(found, None) is None and len(ids) == len(whole["content"]) >= 1


def test_the_choice_of_tools(http: httpx2.Client) -> None:
    named = said(http, CALLED | {"tool_choice": {"type": "tool", "name": "now"}})
    (block,) = named["content"]
    assert (block["type"], block["name"], block["input"]) == ("tool_use", "now", {})
    assert named["stop_reason"] == "tool_use"
    one = {"type": "any", "disable_parallel_tool_use": True}
    assert len(said(http, CALLED | {"tool_choice": one})["content"]) == 1
    for choice in ({"type": "none"}, {"type": "auto"}):  # the demo has never seen a tool
        made = said(http, CALLED | {"tool_choice": choice})
        assert [block["type"] for block in made["content"]] == ["text"]
    history = [*QUESTION, {"role": "assistant", "content": named["content"]}]
    result = {"type": "tool_result", "tool_use_id": block["id"], "content": "noon"}
    history.append({"role": "user", "content": [result]})
    assert said(http, CALLED | {"messages": history, "tool_choice": {"type": "auto"}})["content"]


def test_an_answer_continues_what_the_assistant_has_begun(http: httpx2.Client) -> None:
    begun = [*QUESTION, {"role": "assistant", "content": "12 plus"}]
    continued = {"add_generation_prompt": False, "continue_final_message": True}
    chat = said(http, ASKED | {"messages": begun} | continued, CHAT)
    made = said(http, ASKED | {"messages": begun})
    assert made["content"][0]["text"] == chat["choices"][0]["message"]["content"]
    assert made["usage"]["input_tokens"] == chat["usage"]["prompt_tokens"]


@pytest.mark.parametrize(
    "prompt",
    [
        {},
        {"system": "Be brief."},
        {"tools": TOOLS, "tool_choice": {"type": "auto"}},
        {"tools": TOOLS, "tool_choice": {"type": "none"}},
        {"messages": [*QUESTION, {"role": "assistant", "content": "12 plus"}]},
    ],
)
def test_tokens_are_counted_as_they_are_used(http: httpx2.Client, prompt: dict[str, Any]) -> None:
    asked = {"model": "demo", "messages": QUESTION} | prompt
    usage = said(http, asked | {"max_tokens": 16})["usage"]
    assert said(http, asked, COUNT) == {"input_tokens": usage["input_tokens"]}


def test_why_an_answer_ends(http: httpx2.Client) -> None:
    text = said(http, ASKED)["content"][0]["text"]
    asked, cut = ASKED | {"stop_sequences": ["never written", text[2:5]]}, ASKED | {"max_tokens": 2}
    whole, found = said(http, asked), events(http, asked)
    streamed = "".join(each.get("delta", {}).get("text", "") for each in found)
    assert whole["content"][0]["text"] == streamed == text[: text.find(text[2:5])]
    for ending in (whole, found[-2]["delta"]):
        assert (ending["stop_reason"], ending["stop_sequence"]) == ("stop_sequence", text[2:5])
    for short in (said(http, cut), events(http, cut)[-2]["delta"]):
        assert (short["stop_reason"], short["stop_sequence"]) == ("max_tokens", None)


def test_json_on_request(http: httpx2.Client) -> None:
    form = {"format": {"type": "json_schema", "schema": CITY}}
    (block,) = said(http, ASKED | {"output_config": form})["content"]
    assert json.loads(block["text"]).keys() == {"city"}


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({"messages": [{"role": "king", "content": "x"}]}, "messages.0.role: .*'assistant'"),
        ({"messages": [{"role": "user", "content": [FILE]}]}, "source: no kind 'file'"),
        ({"messages": [{"role": "user", "content": [IMAGE]}]}, "this model takes no images"),
        ({"messages": [{"role": "assistant", "content": [IMAGE]}]}, "image belongs .*the user"),
        ({"messages": [{"role": "user", "content": [{"type": "video"}]}]}, "no kind 'video'"),
        ({"messages": [{"role": "user", "content": [USE]}]}, "tool_use belongs .*the assistant"),
        ({"messages": [{"role": "assistant", "content": [RESULT]}]}, "tool_result belongs"),
        ({"max_tokens": 0}, "max_tokens: "),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools.0.type: "),
        ({"tool_choice": {"type": "tool"}}, "tool_choice: .* needs a name"),
        ({"thinking": {"type": "enabled", "budget_tokens": 9}}, "thinking is not supported"),
        ({"output_config": {"effort": "extreme"}}, "output_config.effort: .*'xhigh'"),
        ({"thread": {"type": "create"}}, "send the whole conversation"),
        ({"stop": ["x"]}, "Unrecognized request argument supplied: stop"),
        # What the chat refuses, in this API's names.
        ({"messages": [{"role": "user", "content": "a " * 9000}]}, "maximum context length"),
        ({"output_config": {"format": NOT}}, "output_config.format"),
    ],
)
def test_refusals_have_their_reason(http: httpx2.Client, body: dict[str, Any], words: str) -> None:
    found = refusal(http.post(PATH, json=ASKED | body), 400)
    assert found.startswith("invalid_request_error: ") and re.search(words, found), found


def test_errors_have_anthropics_shape(http: httpx2.Client, demo: Service) -> None:
    unknown = refusal(http.post(PATH, json=ASKED | {"model": "other"}), 404)
    assert unknown.startswith("not_found_error: ") and "`other`" in unknown
    assert refusal(http.get(f"{PATH}/batches"), 404).startswith("not_found_error")
    assert refusal(http.get(PATH), 405).startswith("invalid_request_error")
    assert refusal(http.post(COUNT, json={}), 400).startswith("invalid_request_error: messages")
    assert refusal(http.post(PATH, content=b"{}"), 415).startswith("invalid_request_error")
    with serve(demo, ApiSettings(max_body_bytes=10, api_keys=("right",))) as url:
        large = refusal(httpx2.post(url + PATH, json=ASKED, headers={"x-api-key": "right"}), 413)
        assert large.startswith("request_too_large")
        for headers in ({}, {"x-api-key": "wrong"}, {"x-api-key": ""}, {"x-api-key": "Bearer r"}):
            found = refusal(httpx2.post(url + PATH, json=ASKED, headers=headers), 401)
            assert found.startswith("authentication_error: ") and "x-api-key" in found


def test_a_stream_that_breaks_ends_with_an_error(breaking_url: str) -> None:
    with httpx2.Client(base_url=breaking_url) as http:
        found = events(http, ASKED | {"model": "some"})
    assert found[0]["type"] == "message_start"
    error = {"type": "api_error", "message": bug().message}
    assert found[-1] == {"type": "error", "error": error}
    assert "message_stop" not in {event["type"] for event in found}
