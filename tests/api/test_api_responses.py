"""OpenAI's Responses API: the answers of chats in its shape, whole and as typed events."""

import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from openai import OpenAI, pydantic_function_tool
from pydantic import BaseModel, Field

QUESTION = "Anna buys 3 pens for 4 dollars each. How much does she pay?"
MESSAGES: list[Any] = [{"role": "user", "content": QUESTION}]
CITY = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 8}},
    "required": ["city"],
}
TOOLS: list[Any] = [
    {"type": "function", "name": "get_weather", "parameters": CITY, "strict": True},
    {"type": "function", "name": "now", "parameters": None, "strict": None},
]
AS_CITY = {"text": {"format": {"type": "json_schema", "schema": CITY}}}
NO_JSON = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{"}
SMALL_BLOCKS = {"diffusion": {"block_length": 8}}
LOGPROBS: list[Any] = ["message.output_text.logprobs"]


class Person(BaseModel):
    """Someone, as a client's model."""

    name: str = Field(max_length=12)
    age: int = Field(ge=0, le=150)


@pytest.fixture(scope="module")
def client(demo_url: str) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{demo_url}/v1", api_key="none", max_retries=0) as client:
        yield client


def typed(client: OpenAI, **asked: Any) -> list[Any]:
    """Return the events of a stream, which are numbered."""
    body: dict[str, Any] = {"model": "demo", "input": QUESTION, "max_output_tokens": 64} | asked
    events = list(client.responses.create(**body, stream=True))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    return events


def same(one: Any, other: Any) -> None:
    """Check that two answers differ in nothing but their names and times."""
    left, right = (each.model_dump(mode="json") for each in (one, other))
    for made in (left, right):
        for name in ("id", "created_at", "completed_at"):
            made.pop(name)
        for item in made["output"]:
            assert item.pop("id") and item.pop("call_id", "call")
    assert left == right


def test_an_answer_is_the_chats(client: OpenAI) -> None:
    system: Any = {"role": "system", "content": "Be brief."}
    shared: Any = {"model": "demo", "temperature": 0.9, "top_p": 0.8}
    shared["extra_body"] = {"seed": 3, **SMALL_BLOCKS}
    chat = client.chat.completions.create(messages=[system, *MESSAGES], max_tokens=64, **shared)
    told: Any = {"instructions": "Be brief.", "metadata": {"a": "b"}, "store": True}
    made = client.responses.create(input=QUESTION, max_output_tokens=64, **told, **shared)
    assert made.output_text == chat.choices[0].message.content
    assert (made.status, made.error, made.incomplete_details) == ("completed", None, None)
    (item,) = made.output
    assert item.type == "message" and item.status == "completed"
    assert made.id.startswith("resp_")
    assert (made.temperature, made.top_p, made.instructions) == (0.9, 0.8, "Be brief.")
    assert made.metadata == {"a": "b"} and made.model == "demo"
    assert made.model_extra is not None and made.model_extra["store"] is False
    assert chat.model_extra is not None
    assert made.model_extra["diffusion"] == chat.model_extra["diffusion"]
    assert chat.usage is not None and made.usage is not None
    used = chat.usage.prompt_tokens, chat.usage.completion_tokens, chat.usage.total_tokens
    told = made.usage
    assert (told.input_tokens, told.output_tokens, told.total_tokens) == used


def test_the_events_of_a_text(client: OpenAI) -> None:
    events = typed(client, extra_body=SMALL_BLOCKS)
    first, progress, added, part, *deltas, text, part_done, item, completed = events
    kinds = [each.type for each in (first, progress, added, part, text, part_done, item, completed)]
    assert kinds == [
        *("response.created", "response.in_progress", "response.output_item.added"),
        *("response.content_part.added", "response.output_text.done"),
        *("response.content_part.done", "response.output_item.done", "response.completed"),
    ]
    assert len(deltas) > 1 and {each.type for each in deltas} == {"response.output_text.delta"}
    assert "".join(each.delta for each in deltas) == text.text == part_done.part.text
    for opening in (first, progress):
        assert opening.response.status == "in_progress" and opening.response.output == []
    assert added.item.content == [] and added.item.status == "in_progress"
    assert item.item.content[0].text == text.text and item.item.status == "completed"
    assert {each.item_id for each in (part, *deltas, text, part_done)} == {item.item.id}
    asked: Any = {"model": "demo", "input": QUESTION, "max_output_tokens": 64}
    same(completed.response, client.responses.create(**asked, extra_body=SMALL_BLOCKS))


def test_an_answer_that_is_cut_is_incomplete(client: OpenAI) -> None:
    made = client.responses.create(model="demo", input=QUESTION, max_output_tokens=2)
    assert made.status == "incomplete" and made.incomplete_details is not None
    assert made.incomplete_details.reason == "max_output_tokens"
    *_, item, last = typed(client, max_output_tokens=2)
    assert last.type == "response.incomplete" and item.item.status == "incomplete"
    same(last.response, made)


def test_models_are_parsed(client: OpenAI) -> None:
    asked: Any = {"model": "demo", "input": "Mia is 30.", "max_output_tokens": 80}
    assert isinstance(client.responses.parse(text_format=Person, **asked).output_parsed, Person)
    with client.responses.stream(text_format=Person, **asked) as stream:
        assert isinstance(stream.get_final_response().output_parsed, Person)
    made = client.responses.create(text={"format": {"type": "json_object"}}, **asked)
    assert isinstance(json.loads(made.output_text), dict)
    function: Any = pydantic_function_tool(Person)["function"]
    tools: Any = [{"type": "function", **function}]
    with client.responses.stream(tools=tools, tool_choice="required", **asked) as stream:
        (call, *_) = stream.get_final_response().output
    assert call.type == "function_call" and call.name == "Person"
    Person.model_validate_json(call.arguments)


def test_the_events_of_calls(client: OpenAI) -> None:
    asked: dict[str, Any] = {"tools": TOOLS, "tool_choice": "required", "max_output_tokens": 96}
    asked["extra_body"] = SMALL_BLOCKS
    _, _, *events, completed = typed(client, **asked)
    whole = client.responses.create(model="demo", input=QUESTION, **asked)
    same(completed.response, whole)
    assert whole.output and all(item.type == "function_call" for item in whole.output)
    calls = iter(events)
    for index, item in enumerate(completed.response.output):
        added = next(calls)
        assert added.type == "response.output_item.added" and added.output_index == index
        assert (added.item.name, added.item.arguments) == (item.name, "")
        arguments = ""
        while (event := next(calls)).type == "response.function_call_arguments.delta":
            assert event.item_id == item.id
            arguments += event.delta
        assert event.type == "response.function_call_arguments.done"
        assert event.arguments == arguments == item.arguments
        done = next(calls)
        assert done.type == "response.output_item.done" and done.item == item
        assert isinstance(json.loads(arguments), dict)
    assert next(calls, None) is None
    named = client.responses.create(
        model="demo", input=QUESTION, tools=TOOLS, tool_choice={"type": "function", "name": "now"}
    )
    (call,) = named.output
    assert call.type == "function_call" and (call.name, call.arguments) == ("now", "{}")
    history: Any = [*MESSAGES, call.model_dump()]
    history.append({"type": "function_call_output", "call_id": call.call_id, "output": "noon"})
    assert client.responses.create(model="demo", input=history, tools=TOOLS).status == "completed"


def test_logprobs_on_request(client: OpenAI) -> None:
    chat = client.chat.completions.create(
        model="demo", messages=MESSAGES, max_tokens=64, logprobs=True, top_logprobs=2
    )
    assert chat.choices[0].logprobs is not None
    expected = [each.model_dump() for each in chat.choices[0].logprobs.content or []]
    events = typed(client, include=LOGPROBS, top_logprobs=2)
    (text,) = events[-1].response.output[0].content
    assert [each.model_dump() for each in text.logprobs] == expected
    deltas = [each for event in events if event.type.endswith("delta") for each in event.logprobs]
    assert [each.token for each in deltas] == [each["token"] for each in expected]


def test_the_canvas_on_request(client: OpenAI) -> None:
    events = typed(client, stream_options={"include_canvas": True})
    shown = [event for event in events if event.type == "diffusion.canvas"]
    assert shown and all(len(event.canvas) == 64 for event in shown)
    assert shown[0].forwards == 1


@pytest.mark.parametrize(
    ("body", "param", "words"),
    [
        ({"previous_response_id": "resp_1"}, "previous_response_id", "no answer is stored"),
        ({"background": True}, "background", "send false"),
        ({"truncation": "auto"}, "truncation", 'send "disabled"'),
        ({"reasoning": {"effort": "extreme"}}, "reasoning.effort", "'xhigh'"),
        ({"tools": [{"type": "web_search"}]}, "tools", "'function'"),
        ({"tool_choice": {"type": "mcp"}, "tools": TOOLS}, "tool_choice", "'function'"),
        ({"input": None}, "input", "required"),
        ({"input": [{"type": "reasoning", "id": "r"}]}, "input", "no kind 'reasoning'"),
        ({"input": [NO_JSON]}, "input[0].arguments", "not JSON"),
        ({"tools": [{"type": "function", "name": "a b"}]}, "tools", "tools.0.name: "),
        ({"top_logprobs": 2}, "top_logprobs", "include"),
        ({"include": LOGPROBS, "tools": TOOLS}, "include", "does not go with tools"),
        ({"include": ["file_search_call.results"]}, "include", "'reasoning.encrypted_content'"),
        ({"stream_options": {}}, "stream_options", "stream: true"),
        ({"text": {"verbosity": "loud"}}, "text.verbosity", "'medium'"),
        ({"n": 2}, "n", "Unrecognized"),
        # What the chat refuses, in this API's names.
        ({"input": "word " * 5000}, "input", "maximum context length"),
        (AS_CITY | {"max_output_tokens": 3}, "max_output_tokens", "shortest text takes"),
    ],
)
def test_refusals_name_it(client: OpenAI, body: dict[str, Any], param: str, words: str) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        client.post("/responses", body={"input": QUESTION} | body, cast_to=object)
    assert refused.value.param is not None and refused.value.param.startswith(param)
    assert words in refused.value.message


def test_neutral_values_and_notes_change_nothing(client: OpenAI) -> None:
    asked: Any = {"model": "demo", "input": QUESTION, "max_output_tokens": 32}
    notes: Any = {"truncation": "disabled", "background": False, "store": False, "tools": []}
    notes |= {"reasoning": {"effort": "high"}, "include": ["reasoning.encrypted_content"]}
    notes |= {"text": {"format": {"type": "text"}, "verbosity": "low"}, "tool_choice": "none"}
    notes |= {"service_tier": "auto", "prompt_cache_key": "k"}
    plain = client.responses.create(**asked)
    noted = client.responses.create(**asked, **notes)
    assert noted.output_text == plain.output_text
    assert noted.reasoning is not None and noted.reasoning.effort == "high"
