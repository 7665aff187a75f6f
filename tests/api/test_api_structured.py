"""Structured outputs over a service: every way to ask for them, and what it refuses."""

import asyncio
import json
import os
import re
import time
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from diffray.cluster.api.anthropic import Messages
from diffray.cluster.api.bodies import ChatBody
from diffray.cluster.api.dialects import answer_stream, answer_whole
from diffray.cluster.api.errors import ApiError
from diffray.cluster.api.responses import Responses
from diffray.cluster.api.service import Service
from diffray.cluster.control.grammar_pool import GrammarPool
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
DEEP_TEXT = '{"items":' * 2000 + "{}" + "}" * 2000
DOUBLED: dict[str, Any] = {"T40": {"type": "null"}}
DOUBLED |= {f"T{n}": {"anyOf": [{"$ref": f"#/$defs/T{n + 1}"}] * 2} for n in range(40)}
HOSTILE: dict[str, tuple[dict[str, Any], str]] = {
    "exponential states": ({"guided_regex": "(a|b)*a(a|b){23}"}, "took more than"),
    "nested repetitions": ({"guided_regex": "((a{1,99}){1,99}){1,99}"}, "took more than|too large"),
    "nested groups": ({"guided_regex": "(" * 2000 + "a" + ")" * 2000}, "nest|recursion"),
    "deep recursion": ({"guided_json": DEEP}, "at most 100 nested"),
    "deep text": ({"guided_json": DEEP_TEXT}, "at most 100 nested|JSON"),
    "doubled references": ({"guided_json": {"$ref": "#/$defs/T0", "$defs": DOUBLED}}, "took more"),
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


async def test_every_way_to_ask_is_honoured(demo: Service) -> None:
    regex, choice = "[0-9]{3}-[0-9]{4}", ["never", "always"]

    def is_person(text: str) -> bool:
        made = json.loads(text)
        return len(made) == 2 and isinstance(made["name"], str) and isinstance(made["age"], int)

    ways: list[tuple[dict[str, Any], Callable[[str], object]]] = [
        ({"response_format": SCHEMA}, is_person),
        ({"response_format": {"type": "json_object", "schema": PERSON}}, is_person),
        ({"structured_outputs": {"json": PERSON}}, is_person),
        ({"guided_json": json.dumps(PERSON)}, is_person),
        ({"response_format": {"type": "json_object"}}, lambda text: json.loads(text).items()),
        ({"structured_outputs": {"regex": regex}}, re.compile(regex).fullmatch),
        ({"guided_regex": regex}, re.compile(regex).fullmatch),
        ({"guided_choice": choice, "response_format": {"type": "text"}}, choice.__contains__),
        ({"structured_outputs": {"choice": choice}}, choice.__contains__),
    ]
    for asked, fits in ways:
        assert fits(await said(demo, asked)), asked
    asked = {"response_format": SCHEMA, "diffusion": {"block_length": 8}}
    chunks = [chunk async for chunk in demo.stream(ChatBody, CHAT | asked | {"stream": True})]
    parts = [chunk["choices"][0]["delta"].get("content", "") for chunk in chunks]
    assert "".join(parts) == await said(demo, asked)


@pytest.mark.slow
async def test_a_nested_grammar_is_labelled_in_every_api(demo: Service) -> None:
    nested = {"structured_outputs": {"grammar": NESTED}}
    dialects: tuple[tuple[type[Responses | Messages], dict[str, Any], str], ...] = (
        (Responses, {"input": "Nest.", "max_output_tokens": 60}, "response.completed"),
        (Messages, CHAT, "message_delta"),
    )
    for asked in ({"guided_grammar": NESTED}, nested):
        asked = CHAT | asked | {"temperature": 1, "seed": 3}
        (choice,) = (await demo.chat(asked))["choices"]
        assert choice["finish_reason"] == "stop"
        text, inner = choice["message"]["content"], None
        while text != inner:
            text, inner = re.sub(r"\(([a-z]+)\)([a-z]+)", r"\2", text), text
        assert re.fullmatch("[a-z]+", text), choice
        label = choice["structured_outputs"]
        assert not label["exact"] and label["depth"] > 2
        *_, last = [chunk async for chunk in demo.stream(ChatBody, asked | {"stream": True})]
        assert last["choices"][0]["structured_outputs"] == label
    exact = {"guided_grammar": 'root ::= "a" root | "b"'}
    (choice,) = (await demo.chat(CHAT | exact))["choices"]
    assert re.fullmatch("a*b", choice["message"]["content"])
    assert "structured_outputs" not in choice
    for dialect, body, ending in dialects:
        whole = await answer_whole(demo, dialect(body | nested))
        assert whole["structured_outputs"]["depth"] > 2
        stream = answer_stream(demo, dialect(body | nested | {"stream": True}))
        (end,) = [event async for event in stream if event["type"] == ending]
        assert end.get("response", end)["structured_outputs"] == whole["structured_outputs"]


async def test_a_pinned_canvas_tells_how_probable_each_field_is(demo: Service) -> None:
    text = "Give job and age as JSON: Tom, 53, is a driver from Tokyo."
    age = {"type": "integer", "minimum": 18, "maximum": 99}
    properties = {"job": {"enum": ["nurse", "driver", "pilot"]}, "age": age}
    asked = {"messages": [{"role": "user", "content": text}], "diffusion": PINNED}
    asked["guided_json"] = {"type": "object", "properties": properties}
    made = await demo.chat(asked | {"logprobs": True})
    (choice,) = made["choices"]
    assert choice["message"]["content"] == '{"job":"driver","age":53}'
    assert made["diffusion"]["forwards"] <= 3
    tokens = [each["token"] for each in choice["logprobs"]["content"]]
    assert "".join(tokens) == choice["message"]["content"]
    fields = choice["fields"]
    assert fields["age"]["options"] == {} and 0.5 < fields["age"]["probability"] <= 1
    options = fields["job"]["options"]
    assert options.keys() == {"nurse", "driver", "pilot"}
    assert sum(options.values()) == pytest.approx(1)
    assert options["driver"] == fields["job"]["probability"] > 0.5
    chunks = [chunk async for chunk in demo.stream(ChatBody, asked | {"stream": True})]
    texts = [chunk["choices"][0]["delta"].get("content", "") for chunk in chunks]
    assert "".join(texts) == choice["message"]["content"]
    choosing = {"prompt": text, "guided_choice": ["yes", "no"], "diffusion": PINNED, "n": 2}
    made = await demo.complete(choosing | {"logprobs": 0, "temperature": 1})
    for choice in made["choices"]:
        (field,) = choice["fields"].values()
        assert field["options"].keys() == {"yes", "no"}
        assert field["options"][choice["text"]] == field["probability"]


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
        ({"diffusion": {"canvas": "free"}}, "diffusion.canvas", "'fixed' or 'pinned'"),
        ({"diffusion": {"slot_length": 4}}, "diffusion.slot_length", "add canvas: 'pinned'"),
    ],
)
def test_refusals_name_it(demo: Service, asked: dict[str, Any], field: str, words: str) -> None:
    error = asyncio.run(refused(demo, asked))
    assert error.param == field and re.search(words, error.message), (error.param, error.message)


@pytest.mark.slow
async def test_hostile_schemas_are_refused_and_others_answered_beside(demo: Service) -> None:
    """Several compile at once, each for 2 s of a core at most; a busy machine takes longer."""

    assert await said(demo, {"guided_choice": ["before"]}) == "before"
    begin = time.monotonic()

    async def seconds(work: Awaitable[Any]) -> tuple[float, Any]:
        found = await work
        return time.monotonic() - begin, found

    hostile = [refused(demo, asked) for asked, _ in HOSTILE.values()]
    twice = refused(demo, HOSTILE["exponential states"][0])
    benign = [said(demo, {"guided_choice": [f"beside {n}"]}) for n in range(3)]
    found = await asyncio.gather(*map(seconds, [*hostile, twice, *benign]))
    limit = 10 * max(1, os.getloadavg()[0] / (os.cpu_count() or 1))
    for (name, (_, words)), (taken, error) in zip(HOSTILE.items(), found, strict=False):
        assert re.search(words, error.message), (name, error.message)
        assert taken < limit, name
    assert found[-4][1].message == found[0][1].message
    assert [answer for _, answer in found[-3:]] == [f"beside {n}" for n in range(3)]
    assert all(taken < limit / 2 for taken, _ in found[-3:])
    assert await said(demo, {"guided_choice": ["after"]}) == "after"


async def test_for_several_it_compiles_once(demo: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    ask, asked = GrammarPool._ask, []

    def counted(pool: GrammarPool, given: str) -> dict[str, Any]:
        asked.append(given)
        return ask(pool, given)

    monkeypatch.setattr(GrammarPool, "_ask", counted)
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


async def test_a_fork_that_was_lost_is_not_held_against_what_was_asked(
    demo: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only one that ended by itself ran into its limit: not on a busy machine, nor if all ended."""
    ask, losses = GrammarPool._ask, iter([TimeoutError, EOFError])

    def lost(pool: GrammarPool, given: str) -> dict[str, Any]:
        if (loss := next(losses, None)) is None:
            return ask(pool, given)
        if loss is EOFError and pool._process is not None:
            pool._process.end()
        raise loss

    assert await said(demo, {"guided_choice": ["any"]}) == "any"
    monkeypatch.setattr(GrammarPool, "_ask", lost)
    for _ in range(2):
        assert "took more than" in (await refused(demo, {"guided_choice": ["lost"]})).message
    assert await said(demo, {"guided_choice": ["lost"]}) == "lost"


def test_a_process_that_does_not_start_is_not_held_against_what_was_asked() -> None:
    service = Service(Recorder(), TOKENIZER, ["some"])
    service._grammars._worker = "diffray.cluster.api.no_such_module"
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
