"""Structured outputs over a service: every way to ask for them, and what it refuses."""

import asyncio
import json
import re
import time
from collections.abc import Iterator
from typing import Any

import pytest

from diffray import DiffusionLLM
from diffray.cluster.api.errors import ApiError
from diffray.cluster.api.service import Service
from diffray.cluster.control.local import LocalEngine
from diffray.components.grammar.structured import StructuredOutputs
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
ENDLESS = "(a|b)*a(a|b){22}"  # four million states


@pytest.fixture(scope="module", autouse=True)
def no_cache_of_the_user(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="module")
def service() -> Iterator[Service]:
    llm = DiffusionLLM("demo", dtype="float32")
    with LocalEngine(llm.engine) as engine:
        made = Service(engine, llm.tokenizer, ["demo"])
        yield made
        made.close()


async def said(service: Service, asked: dict[str, Any]) -> str:
    made = await service.chat(CHAT | asked)
    assert made["choices"][0]["finish_reason"] == "stop"
    return str(made["choices"][0]["message"]["content"])


async def refused(service: Service, asked: dict[str, Any]) -> ApiError:
    with pytest.raises(ApiError) as error:
        await service.chat(CHAT | asked)
    assert error.value.status == 400
    return error.value


def test_every_way_to_ask_is_honoured(service: Service) -> None:
    async def ask() -> None:
        schemas: list[dict[str, Any]] = [
            {"response_format": SCHEMA},
            {"response_format": {"type": "json_object", "schema": PERSON}},
            {"structured_outputs": {"json": PERSON}},
            {"guided_json": json.dumps(PERSON)},
        ]
        for asked in schemas:
            made = json.loads(await said(service, asked))
            assert isinstance(made["name"], str) and isinstance(made["age"], int)
            assert len(made) == 2
        made = json.loads(await said(service, {"response_format": {"type": "json_object"}}))
        assert isinstance(made, dict)
        regex = "[0-9]{3}-[0-9]{4}"
        for expression in ({"structured_outputs": {"regex": regex}}, {"guided_regex": regex}):
            assert re.fullmatch(regex, await said(service, expression))
        for name in ("guided_choice", "structured_outputs"):
            choice: Any = ["never", "always"]
            both = {"response_format": {"type": "text"}}
            value = choice if name == "guided_choice" else {"choice": choice}
            assert await said(service, both | {name: value}) in choice

    asyncio.run(ask())


def test_a_stream_gives_the_same(service: Service) -> None:
    async def ask() -> None:
        asked = {"response_format": SCHEMA, "diffusion": {"block_length": 8}}
        parts = [
            chunk["choices"][0]["delta"].get("content", "")
            async for chunk in service.stream_chat(CHAT | asked | {"stream": True})
        ]
        assert "".join(parts) == await said(service, asked)

    asyncio.run(ask())


@pytest.mark.parametrize(
    ("asked", "field", "words"),
    [
        ({"guided_regex": "(a"}, "guided_regex", "unterminated subpattern"),
        ({"guided_json": {"minProperties": 3}}, "guided_json", "cannot honour .*'minProperties'"),
        ({"guided_regex": "a{100}"}, "max_tokens", "shortest text takes 101 tokens"),
        ({"guided_regex": "(a|b){20000}"}, "guided_regex", "too large|took more than"),
        ({"guided_choice": ["a"], "guided_regex": "b"}, "guided_choice", "exclude each other"),
        ({"structured_outputs": {"rex": "a"}}, "structured_outputs.rex", "did you mean 'regex'"),
        ({"structured_outputs": {}}, "structured_outputs", "give one of json"),
        ({"response_format": {"type": "json_schema"}}, "response_format", "with a json_schema"),
        ({"response_format": {"type": "xml"}}, "response_format.type", "'json_object'"),
        ({"guided_grammar": "root ::= x"}, "guided_grammar", "not supported"),
        ({"guided_json": {}, "ignore_eos": True}, "ignore_eos", "does not go with"),
    ],
)
def test_what_cannot_be_honoured_is_refused_by_name(
    service: Service, asked: dict[str, Any], field: str, words: str
) -> None:
    error = asyncio.run(refused(service, asked))
    assert error.param == field and re.search(words, error.message), (error.param, error.message)


@pytest.mark.slow
def test_an_endless_expression_costs_one_refusal(service: Service) -> None:
    """Meanwhile others are answered; the second time it is refused at once; others compile."""

    async def ask() -> None:
        endless = asyncio.create_task(refused(service, {"guided_regex": ENDLESS}))
        answers = 0
        while not endless.done():
            await service.chat(CHAT | {"max_tokens": 8})
            answers += 1
        assert answers > 3 and "took more than" in endless.result().message
        begin = time.process_time()
        assert "took more than" in (await refused(service, {"guided_regex": ENDLESS})).message
        assert time.process_time() - begin < 1
        assert await said(service, {"guided_choice": ["after"]}) == "after"

    asyncio.run(ask())


def test_without_a_tokenizer_it_is_refused() -> None:
    service = Service(Recorder(), None, ["some"])
    with pytest.raises(ApiError, match="needs a tokenizer"):
        asyncio.run(service.complete({"prompt": [1], "guided_choice": ["a"]}))
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
