"""Requests of other APIs as chats, and the answers of chats in their words, without a server."""

from typing import Any

from diffray.cluster.api.anthropic import Messages
from diffray.cluster.api.errors import ApiError
from diffray.cluster.api.responses import Responses

QUESTION = "What is 12 plus 30?"
MESSAGES: list[Any] = [{"role": "user", "content": QUESTION}]
TEXT = {"type": "text", "text": "Let me see."}
USE = {"type": "tool_use", "id": "toolu_1", "name": "now", "input": {"zone": "UTC"}}
RESULT = {"type": "tool_result", "tool_use_id": "toolu_1"}


def test_items_become_messages() -> None:
    text = {"type": "output_text", "text": "Let me see.", "annotations": [], "logprobs": []}
    said = {"type": "message", "id": "m", "role": "assistant", "status": "completed"}
    calls: list[Any] = [
        {"type": "function_call", "id": f"fc_{name}", "call_id": name, "name": "now"}
        | {"arguments": "{}", "status": "completed"}
        for name in ("c1", "c2")
    ]
    outputs: list[Any] = [
        {"type": "function_call_output", "call_id": "c1", "output": "noon"},
        {"type": "function_call_output", "call_id": "c2"}
        | {"output": [{"type": "input_text", "text": "12:00"}]},
    ]
    body = {
        "instructions": "Be brief.",
        "input": [*MESSAGES, said | {"content": [text]}, *calls, *outputs],
    }
    system, user, assistant, *results = Responses(body).chat["messages"]
    assert system == {"role": "system", "content": "Be brief."} and user == MESSAGES[0]
    assert assistant["content"] == [{"type": "text", "text": "Let me see."}]
    assert [call["id"] for call in assistant["tool_calls"]] == ["c1", "c2"]
    assert results == [
        {"role": "tool", "tool_call_id": "c1", "content": "noon"},
        {"role": "tool", "tool_call_id": "c2", "content": [{"type": "text", "text": "12:00"}]},
    ]


def test_blocks_become_messages() -> None:
    turns: list[Any] = [
        {"role": "user", "content": "What time is it?"},
        {"role": "user", "content": [{"type": "text", "text": "In UTC."}]},
        {"role": "assistant", "content": [TEXT, USE]},
        {"role": "user", "content": [RESULT | {"content": "lost", "is_error": True}, TEXT]},
    ]
    user, assistant, result, more = Messages({"messages": turns}).chat["messages"]
    assert [part["text"] for part in user["content"]] == ["What time is it?", "In UTC."]
    assert assistant["content"] == [TEXT]
    function = {"name": "now", "arguments": {"zone": "UTC"}}
    assert assistant["tool_calls"] == [{"id": "toolu_1", "type": "function", "function": function}]
    assert (result["role"], result["tool_call_id"]) == ("tool", "toolu_1")
    assert [part["text"] for part in result["content"]] == ["Error:", "lost"]
    assert more == {"role": "user", "content": [TEXT]}


def test_images_become_parts_of_messages() -> None:
    """Where they stand among texts, and in the results of calls."""
    url = "https://example.com/cat.png"
    shown = [{"type": "image_url", "image_url": {"url": url}}, TEXT]
    text = {"type": "input_text", "text": TEXT["text"]}
    image = {"type": "input_image", "image_url": url, "detail": "high", "file_id": None}
    output = {"type": "function_call_output", "call_id": "c1", "output": [image, text]}
    made = Responses({"input": [{"role": "user", "content": [image, text]}, output]})
    user, result = made.chat["messages"]
    assert user == {"role": "user", "content": shown} and result["content"] == shown

    source = {"type": "base64", "media_type": "image/webp", "data": "AAAA"}
    block: Any = {"type": "image", "source": source, "cache_control": {"type": "ephemeral"}}
    by_url = {"type": "image", "source": {"type": "url", "url": url}}
    turn = {"role": "user", "content": [RESULT | {"content": [by_url, TEXT]}, block, TEXT]}
    result, user = Messages({"messages": [turn]}).chat["messages"]
    assert result["content"] == shown
    data = {"type": "image_url", "image_url": {"url": "data:image/webp;base64,AAAA"}}
    assert user["content"] == [data, TEXT]
    assert "AAAA" not in repr(Messages({"messages": [turn]}).body)


def test_a_stream_that_fails_says_so() -> None:
    """The events of a chat whose engine is lost after the first delta."""
    made = Responses({"input": QUESTION, "stream": True})
    choice = {"index": 0, "delta": {"content": "It"}, "logprobs": None, "finish_reason": None}
    chunk = {"id": "chatcmpl-1", "created": 1, "model": "demo", "choices": [choice]}
    events = [*made.events(chunk), made.failed(ApiError(503, "lost", code="engine_unavailable"))]
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    failed = events[-1]
    assert failed["type"] == "response.failed" and failed["response"]["status"] == "failed"
    assert failed["response"]["error"] == {"code": "server_error", "message": "lost"}
    (item,) = failed["response"]["output"]
    assert item["content"][0]["text"] == "It" and item["status"] == "incomplete"


def test_text_and_calls_are_items_of_their_own() -> None:
    made = Responses({"input": QUESTION})
    calls = [
        {"id": f"call_{name}", "type": "function", "function": {"name": name, "arguments": "{}"}}
        for name in ("now", "later")
    ]
    message = {"role": "assistant", "content": "So:", "tool_calls": calls}
    usage = {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5}
    choice = {"index": 0, "message": message, "logprobs": None, "stop_reason": None}
    answer: dict[str, Any] = {"id": "chatcmpl-1", "created": 1, "model": "demo"}
    answer["choices"] = [choice | {"finish_reason": "tool_calls"}]
    answer["usage"] = usage | {"prompt_tokens_details": {"cached_tokens": 1}}
    result = made.whole(answer)
    text, now, later = result["output"]
    assert text["content"][0]["text"] == "So:"
    named = [(each["name"], each["call_id"]) for each in (now, later)]
    assert named == [("now", "call_now"), ("later", "call_later")]
    assert len({each["id"] for each in result["output"]}) == 3
    assert result["usage"]["input_tokens_details"]["cached_tokens"] == 1
    said = Messages({"max_tokens": 8, "messages": MESSAGES}).whole(answer)
    assert [each["type"] for each in said["content"]] == ["text", "tool_use", "tool_use"]
    tokens = said["usage"]["input_tokens"], said["usage"]["cache_read_input_tokens"]
    assert tokens == (2, 1), "cached tokens are counted apart"
