"""Structured outputs over a service: every way to ask for them, and what it refuses."""

import asyncio
import json
import os
import re
import time
from collections.abc import Awaitable
from typing import Any

import pytest

from diffray.cluster.api.anthropic import Messages
from diffray.cluster.api.dialects import answer_stream, answer_whole
from diffray.cluster.api.errors import ApiError
from diffray.cluster.api.limited_process import ForkingProcess
from diffray.cluster.api.responses import Responses
from diffray.cluster.api.service import Service
from diffray.components.grammar.structured import StructuredOutputs
from tests.helpers.byte_tokenizer import TOKENIZER
from tests.helpers.recorder import Recorder

PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 12}, "age": {"type": "integer"}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
CHAT: dict[str, Any] = {
    "messages": [{"role": "user", "content": "What is the colour of a Tuesday?"}],
    "max_tokens": 60,
}
SCHEMA = {"type": "json_schema", "json_schema": {"name": "person", "schema": PERSON}}
PINNED = {"canvas": "pinned"}
NESTED = 'root ::= "(" root ")" root | [a-z]+'
DEEP: Any = {"type": "string"}
for _ in range(2000):
    DEEP = {"type": "array", "items": DEEP}
DOUBLED = {f"T{n}": {"anyOf": [{"$ref": f"#/$defs/T{n + 1}"}] * 2} for n in range(40)}
HOSTILE: dict[str, tuple[dict[str, Any], str]] = {
    "exponential states": ({"guided_regex": "(a|b)*a(a|b){23}"}, "took more than"),
    "states of a pattern": (
        {"guided_json": {"type": "string", "pattern": "(a|b)*a(a|b){24}"}},
        "took more than",
    ),
    "nested repetitions": ({"guided_regex": "((a{1,99}){1,99}){1,99}"}, "took more than|too large"),
    "nested groups": ({"guided_regex": "(" * 2000 + "a" + ")" * 2000}, "nest|recursion"),
    "deep recursion": ({"guided_json": DEEP}, "at most 100 nested"),
    "deep text": (
        {"guided_json": '{"items":' * 2000 + "{}" + "}" * 2000},
        "at most 100 nested|JSON",
    ),
    "doubled references": (
        {"guided_json": {"$ref": "#/$defs/T0", "$defs": DOUBLED | {"T40": {"type": "null"}}}},
        "took more than",
    ),
}


async def said(service: Service, asked: dict[str, Any]) -> str:
    made = await service.chat(CHAT | asked)
    assert made["choices"][0]["finish_reason"] == "stop"
    return str(made["choices"][0]["message"]["content"])


async def refused(service: Service, asked: dict[str, Any]) -> ApiError:
    with pytest.raises(ApiError) as error:
        await service.chat(CHAT | asked)
    assert error.value.status == 400
    return error.value


def test_every_way_to_ask_is_honoured(demo: Service) -> None:
    async def ask() -> None:
        schemas: list[dict[str, Any]] = [
            {"response_format": SCHEMA},
            {"response_format": {"type": "json_object", "schema": PERSON}},
            {"structured_outputs": {"json": PERSON}},
            {"guided_json": json.dumps(PERSON)},
        ]
        for asked in schemas:
            made = json.loads(await said(demo, asked))
            assert isinstance(made["name"], str) and isinstance(made["age"], int)
            assert len(made) == 2
        made = json.loads(await said(demo, {"response_format": {"type": "json_object"}}))
        assert isinstance(made, dict)
        regex = "[0-9]{3}-[0-9]{4}"
        for expression in ({"structured_outputs": {"regex": regex}}, {"guided_regex": regex}):
            assert re.fullmatch(regex, await said(demo, expression))
        for name in ("guided_choice", "structured_outputs"):
            choice: Any = ["never", "always"]
            both = {"response_format": {"type": "text"}}
            value = choice if name == "guided_choice" else {"choice": choice}
            assert await said(demo, both | {name: value}) in choice

    asyncio.run(ask())


def test_a_nested_grammar_is_labelled(demo: Service) -> None:
    async def ask() -> None:
        for asked in ({"guided_grammar": NESTED}, {"structured_outputs": {"grammar": NESTED}}):
            made = await demo.chat(CHAT | asked | {"temperature": 1, "seed": 3})
            (choice,) = made["choices"]
            assert choice["finish_reason"] == "stop"
            text, inner = choice["message"]["content"], None
            while text != inner:
                text, inner = re.sub(r"\(([a-z]+)\)([a-z]+)", r"\2", text), text
            assert re.fullmatch("[a-z]+", text), choice
            assert not choice["structured_outputs"]["exact"]
            assert choice["structured_outputs"]["depth"] > 2
            chunks = [chunk async for chunk in demo.stream_chat(CHAT | asked | {"stream": True})]
            label = chunks[-1]["choices"][0]["structured_outputs"]
            assert label == choice["structured_outputs"]
        exact = {"guided_grammar": 'root ::= "a" root | "b"'}
        (choice,) = (await demo.chat(CHAT | exact))["choices"]
        assert re.fullmatch("a*b", choice["message"]["content"])
        assert "structured_outputs" not in choice

    asyncio.run(ask())


@pytest.mark.parametrize(
    ("dialect", "asked", "ending"),
    [
        (Responses, {"input": "Nest.", "max_output_tokens": 60}, "response.completed"),
        (Messages, CHAT, "message_delta"),
    ],
)
def test_the_label_stands_in_every_api(
    demo: Service, dialect: type[Responses | Messages], asked: dict[str, Any], ending: str
) -> None:
    body = asked | {"structured_outputs": {"grammar": NESTED}}

    async def ask() -> None:
        whole = await answer_whole(demo, dialect(body))
        assert whole["structured_outputs"]["depth"] > 2
        made = dialect(body | {"stream": True})
        events = [event async for event in answer_stream(demo, made)]
        last = next(event for event in events if event["type"] == ending)
        assert last.get("response", last)["structured_outputs"] == whole["structured_outputs"]

    asyncio.run(ask())


def test_a_stream_gives_the_same(demo: Service) -> None:
    async def ask() -> None:
        asked = {"response_format": SCHEMA, "diffusion": {"block_length": 8}}
        parts = [
            chunk["choices"][0]["delta"].get("content", "")
            async for chunk in demo.stream_chat(CHAT | asked | {"stream": True})
        ]
        assert "".join(parts) == await said(demo, asked)

    asyncio.run(ask())


def test_a_pinned_canvas_tells_how_probable_each_field_is(demo: Service) -> None:
    text = "Give job and age as JSON: Tom, 53, is a driver from Tokyo."
    schema = {
        "type": "object",
        "properties": {
            "job": {"enum": ["nurse", "driver", "pilot"]},
            "age": {"type": "integer", "minimum": 18, "maximum": 99},
        },
    }
    asked = {
        "messages": [{"role": "user", "content": text}],
        "response_format": {"type": "json_schema", "json_schema": {"schema": schema}},
        "diffusion": PINNED,
    }

    async def ask() -> None:
        made = await demo.chat(asked | {"logprobs": True})
        (choice,) = made["choices"]
        assert choice["message"]["content"] == '{"job":"driver","age":53}'
        assert choice["finish_reason"] == "stop"
        assert made["diffusion"]["forwards"] <= 3
        assert made["usage"]["completion_tokens"] == len(choice["logprobs"]["content"])
        fields = choice["fields"]
        assert fields["age"]["options"] == {} and 0.5 < fields["age"]["probability"] <= 1
        options = fields["job"]["options"]
        assert options.keys() == {"nurse", "driver", "pilot"}
        assert sum(options.values()) == pytest.approx(1)
        assert options["driver"] == fields["job"]["probability"] > 0.5
        chunks = [chunk async for chunk in demo.stream_chat(asked | {"stream": True})]
        texts = [chunk["choices"][0]["delta"].get("content", "") for chunk in chunks]
        assert "".join(texts) == choice["message"]["content"]
        choosing = {"prompt": text, "guided_choice": ["yes", "no"], "diffusion": PINNED, "n": 2}
        made = await demo.complete(choosing | {"logprobs": 0, "temperature": 1})
        for choice in made["choices"]:
            (field,) = choice["fields"].values()
            assert field["options"].keys() == {"yes", "no"}
            assert field["options"][choice["text"]] == field["probability"]

    asyncio.run(ask())


@pytest.mark.parametrize(
    ("asked", "field", "words"),
    [
        ({"guided_regex": "(a"}, "guided_regex", "unterminated subpattern"),
        ({"guided_json": {"minProperties": 3}}, "guided_json", "cannot honour .*'minProperties'"),
        ({"guided_regex": "a{100}"}, "max_tokens", "shortest text takes 101 tokens"),
        ({"guided_choice": ["a"], "guided_regex": "b"}, "guided_choice", "exclude each other"),
        ({"structured_outputs": {"rex": "a"}}, "structured_outputs.rex", "did you mean 'regex'"),
        ({"response_format": {"type": "json_schema"}}, "response_format", "needs a json_schema"),
        ({"response_format": {"type": "xml"}}, "response_format.type", "'json_object'"),
        ({"guided_grammar": "root ::= x"}, "guided_grammar", "line 1: 'x' is not a rule"),
        ({"guided_grammar": NESTED, "diffusion": PINNED}, "guided_grammar", "a JSON schema or"),
        ({"guided_json": {}, "ignore_eos": True}, "ignore_eos", "does not go with"),
        ({"diffusion": PINNED}, "diffusion.canvas", "needs structured outputs"),
        ({"diffusion": PINNED, "guided_regex": "a"}, "guided_regex", "a JSON schema or a choice"),
        ({"diffusion": PINNED, "guided_json": {"const": 1}}, "guided_json", "one answer only"),
        ({"diffusion": PINNED, "guided_json": PERSON, "max_tokens": 9}, "max_tokens", "positions"),
        ({"diffusion": {"canvas": "fixed"}}, "diffusion.canvas", "'free' or 'pinned'"),
        ({"diffusion": {"slot_length": 4}}, "diffusion.slot_length", "add canvas: 'pinned'"),
    ],
)
def test_what_cannot_be_honoured_is_refused_by_name(
    demo: Service, asked: dict[str, Any], field: str, words: str
) -> None:
    error = asyncio.run(refused(demo, asked))
    assert error.param == field and re.search(words, error.message), (error.param, error.message)


@pytest.mark.slow
def test_hostile_schemas_are_refused_soon_and_others_answered_beside_them(
    demo: Service,
) -> None:
    """Several compile at once, each for 2 s of a core at most; a busy machine takes longer."""
    began: list[float] = []

    async def seconds(work: Awaitable[Any]) -> tuple[float, Any]:
        found = await work
        return time.monotonic() - began[0], found

    async def ask() -> None:
        assert await said(demo, {"guided_choice": ["before"]}) == "before"
        began.append(time.monotonic())
        hostile = [refused(demo, asked) for asked, _ in HOSTILE.values()]
        twice = refused(demo, HOSTILE["exponential states"][0])
        benign = [said(demo, {"guided_choice": [f"beside {n}"]}) for n in range(3)]
        found = await asyncio.gather(*map(seconds, [*hostile, twice, *benign]))
        limit = 10 * max(1, os.getloadavg()[0] / (os.cpu_count() or 1))
        for (name, (_, words)), (taken, error) in zip(HOSTILE.items(), found, strict=False):
            assert re.search(words, error.message), (name, error.message)
            assert taken < limit, name
        assert found[-4][1].message == found[0][1].message
        for number, (taken, answer) in enumerate(found[-3:]):
            assert answer == f"beside {number}"
            assert taken < limit / 2
        assert await said(demo, {"guided_choice": ["after"]}) == "after"

    asyncio.run(ask())


def test_what_several_ask_for_at_once_is_compiled_once(
    demo: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    ask, asked = ForkingProcess.ask, []

    async def counted(process: ForkingProcess, given: dict[str, Any]) -> dict[str, Any]:
        asked.append(given)
        return await ask(process, given)

    async def together() -> None:
        for choice, count in (("one", 1), ("another", 2)):
            work = [said(demo, {"guided_choice": [choice]}) for _ in range(5)]
            waiting = [asyncio.create_task(each) for each in work]
            while len(asked) < count:
                await asyncio.sleep(0)
            waiting[0].cancel()  # the others get their answer
            assert await asyncio.gather(*waiting[1:]) == [choice] * 4
            assert len(asked) == count
        for _ in range(2):  # what is refused is known, too
            await refused(demo, {"guided_regex": "(once"})
        assert len(asked) == 3

    monkeypatch.setattr(ForkingProcess, "ask", counted)
    asyncio.run(together())


def test_a_process_that_does_not_start_is_not_held_against_what_was_asked() -> None:
    service = Service(Recorder(), TOKENIZER, ["some"])
    service._grammars.process = ForkingProcess("diffray.cluster.api.no_such_module", dict)
    for _ in range(2):
        with pytest.raises(ApiError, match="did not start") as error:
            asyncio.run(service.complete({"prompt": [1], "guided_choice": ["a"]}))
        assert error.value.status == 503
    service.close()


def test_what_was_compiled_is_kept_on_disk(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    from diffray.components.grammar import compile as compiling

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
    vocabulary = {b"a": [0], b"b": [1]}
    outputs = StructuredOutputs(regex="a+b")
    first = compiling.Grammars(vocabulary, (2,), 3).compile(outputs)
    monkeypatch.setattr(compiling, "compile_regex", None)
    assert compiling.Grammars(vocabulary, (2,), 3).compile(outputs) == first
    with pytest.raises(TypeError):  # another vocabulary has another automaton
        compiling.Grammars(vocabulary, (2,), 4).compile(outputs)
