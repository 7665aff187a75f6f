"""The OpenAPI document and the page at /docs say what the endpoints really do."""

import json
import re
import time
from base64 import b64encode
from collections.abc import AsyncGenerator, Iterator
from contextlib import closing
from hashlib import sha256
from html import unescape
from pathlib import Path
from typing import Any

import httpx2
import pytest
from jsonschema import Draft202012Validator, ValidationError

from diffray.cluster.api.api_examples import REQUESTS
from diffray.cluster.api.errors import bug
from diffray.cluster.api.http_app import build_api
from diffray.cluster.api.openapi import BODIES
from diffray.cluster.api.operations import (
    JOIN_TRAINER,
    LEAVE_TRAINER,
    LOAD_ADAPTER,
    OPERATED,
    RECEIVE_WEIGHTS,
    UNLOAD_ADAPTER,
)
from diffray.cluster.api.service import Service
from diffray.cluster.api.settings import ApiSettings
from diffray.cluster.control.engine_client import (
    DeadlineExceeded,
    EngineFailed,
    Overloaded,
    Poisonous,
)
from diffray.cluster.control.engine_config import EngineConfig
from diffray.cluster.control.local import load_local
from diffray.workers.adapters import LoadedAdapters
from diffray.workers.messages import Update
from tests.helpers.adapters import adapter_of
from tests.helpers.api_server import events, serve
from tests.helpers.byte_tokenizer import TOKENIZER
from tests.helpers.recorder import Recorder

CHAT, COMPLETE = "/v1/chat/completions", "/v1/completions"
ABC = {"prompt": "abc"}
RESPOND, MESSAGES, COUNT = "/v1/responses", "/v1/messages", "/v1/messages/count_tokens"
CONVERSATION = {"messages": [{"role": "user", "content": "abc"}]}
ASKED: dict[str, dict[str, Any]] = {
    COMPLETE: ABC,
    RESPOND: {"input": "abc"},
    MESSAGES: CONVERSATION,
}
KEY = {"Authorization": "Bearer key"}
UNHEARD_OF = 'event: unheard of\ndata: {"type": "unheard of"}\n\n'
WITH_TRAINER = (JOIN_TRAINER, RECEIVE_WEIGHTS, LEAVE_TRAINER)


@pytest.fixture(scope="module")
def document() -> dict[str, Any]:
    return build_api(lambda: Service(Recorder(), None, ["some"])).openapi()


@pytest.fixture(scope="module")
def demo() -> Iterator[httpx2.Client]:
    engine, tokenizer = load_local("demo", EngineConfig(max_num_seqs=4))
    adapters = LoadedAdapters("demo")
    told: dict[str, Any] = {"description": "A toy.", "examples": ["a"]}
    service = Service(engine, tokenizer, ["demo"], adapters=adapters, **told)
    with (
        engine,
        closing(service),
        serve(service, ApiSettings(operator_keys=("key",))) as url,
        httpx2.Client(base_url=url, timeout=60, headers=KEY) as http,
    ):
        yield http


def operations(document: dict[str, Any]) -> Iterator[tuple[str, str, dict[str, Any]]]:
    for path, found in document["paths"].items():
        for method, operation in found.items():
            yield path, method, operation


def check(document: dict[str, Any], path: str, answer: httpx2.Response) -> None:
    """Compare an answer with what the document says of its path, status and content."""
    ((_, _, operation),) = (each for each in operations(document) if each[0] == path)
    declared = operation["responses"][str(answer.status_code)]
    kind = answer.headers["content-type"].partition(";")[0]
    schema = declared["content"][kind]["schema"]
    for name in declared.get("headers", {}):
        assert name in answer.headers
    objects = [answer.json()] if kind == "application/json" else events(answer.text)
    for each in objects:
        valid(document, schema, each)


def valid(document: dict[str, Any], schema: dict[str, Any], value: object) -> None:
    Draft202012Validator(schema | {"components": document["components"]}).validate(value)


def test_every_field_has_a_meaning(document: dict[str, Any]) -> None:
    for name, schema in document["components"]["schemas"].items():
        for field, about in schema.get("properties", {}).items():
            assert about.get("description"), f"{name}.{field}"
    for path, _, operation in operations(document):
        assert operation["summary"] and operation["tags"], path
        for parameter in operation.get("parameters", ()):
            assert parameter["description"], path
    Draft202012Validator.check_schema({"$defs": document["components"]["schemas"]})


def test_of_several_models_the_examples_name_one(document: dict[str, Any]) -> None:
    service = Service(Recorder(), None, ["some"])
    several = build_api(lambda: service, model="first").openapi()
    for path in BODIES:
        content = several["paths"][path]["post"]["requestBody"]["content"]["application/json"]
        for name, example in content["examples"].items():
            assert example["value"] == {"model": "first", **REQUESTS[path][name]["value"]}
            assert "model" not in REQUESTS[path][name]["value"]
    assert several["components"] == document["components"]


def test_every_reference_leads_somewhere(document: dict[str, Any]) -> None:
    schemas = document["components"]["schemas"]
    found = set(re.findall(r'"#/components/schemas/(\w+)"', json.dumps(document)))
    assert found <= set(schemas) <= found | {body.__name__ for body in BODIES.values()}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("path", "name"),
    [(path, name) for path in REQUESTS if path not in WITH_TRAINER for name in REQUESTS[path]],
)
def test_examples_are_answered_as_described(
    document: dict[str, Any], demo: httpx2.Client, tmp_path: Path, path: str, name: str
) -> None:
    content = document["paths"][path]["post"]["requestBody"]["content"]["application/json"]
    body = content["examples"][name]["value"]
    if path in (LOAD_ADAPTER, UNLOAD_ADAPTER):
        adapter = {"lora_name": "mine", "lora_path": str(adapter_of("demo", tmp_path / "mine"))}
        demo.post(UNLOAD_ADAPTER, json={"lora_name": "mine"})
        if path == UNLOAD_ADAPTER:
            demo.post(LOAD_ADAPTER, json=adapter)
        else:
            body = body | adapter
    answer = demo.post(path, json=body)
    assert answer.status_code == 200, answer.text
    check(document, path, answer)
    if name == "json" and path == CHAT:
        said = json.loads(answer.json()["choices"][0]["message"]["content"])
        assert said == {"job": "nurse", "age": 31}


@pytest.mark.parametrize("path", WITH_TRAINER)
def test_examples_for_a_trainer_are_answered(document: dict[str, Any], path: str) -> None:
    (example,) = REQUESTS[path].values()
    settings = ApiSettings(operator_keys=("key",))
    with serve(Service(Recorder(), None, ["some"]), settings) as url:
        answer = httpx2.post(url + path, json=example["value"], headers=KEY)
        assert answer.status_code == 200, answer.text
        check(document, path, answer)


EVERYTHING = {
    "logprobs": True, "top_logprobs": 2, "n": 2, "return_token_ids": True,
    "return_trajectory": True, "max_tokens": 8,
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("stream", [False, True])
def test_answers_are_described(document: dict[str, Any], demo: httpx2.Client, stream: bool) -> None:
    asked: dict[str, Any] = EVERYTHING | {"stream": stream}
    if stream:
        watch = {"include_canvas": True, "include_usage": True, "continuous_usage_stats": True}
        asked["stream_options"] = watch
    text = {n: v for n, v in asked.items() if n != "top_logprobs"} | {"logprobs": 2}
    logprobs = {"include": ["message.output_text.logprobs"], "top_logprobs": 2, "stream": stream}
    for path, body in (
        (CHAT, asked | CONVERSATION),
        (COMPLETE, text | ABC),
        (RESPOND, ASKED[RESPOND] | {"max_output_tokens": 8} | logprobs),
        (RESPOND, REQUESTS[RESPOND]["tools"]["value"] | {"stream": stream}),
        (MESSAGES, REQUESTS[MESSAGES]["tools"]["value"] | {"stream": stream}),
    ):
        answer = demo.post(path, json=body)
        assert answer.status_code == 200, answer.text
        check(document, path, answer)
    for path in ("/v1/models", "/v1/models/demo", "/tokenizer_info", "/version", "/load"):
        check(document, path.replace("/demo", "/{name}"), demo.get(path))


@pytest.mark.parametrize("path", [*ASKED, CHAT])
def test_errors_in_streams_fit(document: dict[str, Any], breaking_url: str, path: str) -> None:
    asked = ASKED.get(path, CONVERSATION)
    answer = httpx2.post(breaking_url + path, json=asked | {"stream": True})
    assert bug().message in answer.text
    check(document, path, answer)
    with pytest.raises(ValidationError):
        check(document, path, httpx2.Response(200, headers=answer.headers, text=UNHEARD_OF))


KNOWN: list[dict[str, Any]] = [{"best_of": 3}, {"lora": "a"}, {"suffix": 5}, {"thread": "a"}]
KNOWN += [{"temperature": "hot"}, {"diffusion": {"colour": 7}}, {"verbosity": "loud"}]


@pytest.mark.parametrize("path", [*ASKED, CHAT, COUNT, "/tokenize"])
def test_unknown_fields_are_ignored_on_request(document: dict[str, Any], path: str) -> None:
    """Not known ones with values that are not supported, nor those within an object."""
    asked = ASKED.get(path, CONVERSATION)
    odd: dict[str, Any] = {"max_token": 5, "\u2603\n": None} | {f"x{each}": [] for each in range(9)}
    service = Service(Recorder(), TOKENIZER, ["some"])
    with serve(service, ApiSettings(ignore_unknown_fields=True)) as url:
        whole = httpx2.post(url + path, json=asked | odd)
        told = whole.json()["warnings"]
        for stream in (False, True) if path in (*ASKED, CHAT) else ():
            answer = httpx2.post(url + path, json=asked | odd | {"stream": stream})
            assert answer.headers["x-diffray-warnings"] == "; ".join(told)
            assert told[0] in answer.text
            check(document, path, answer)
        refused = [httpx2.post(url + path, json=asked | odd | each) for each in KNOWN]
        assert "warnings" not in httpx2.post(url + path, json=asked).json()
    assert told[0].startswith("the unknown field 'max_token' is ignored")
    assert told[1] == r"the unknown field '\u2603\n' is ignored"
    assert told[10:] == ["other unknown fields that are ignored: 1"]
    assert [each.status_code for each in refused] == [400] * len(KNOWN)
    check(document, path, whole)


def test_examples_of_answers_fit_their_descriptions(document: dict[str, Any]) -> None:
    count = 0
    for _, _, operation in operations(document):
        for answer in operation["responses"].values():
            for media in answer.get("content", {}).values():
                if "example" in media:
                    found = media["example"]
                    for each in events(found) if isinstance(found, str) else [found]:
                        valid(document, media["schema"], each)
                        count += 1
    assert count > 50


class Refusing(Recorder):
    """An engine that refuses every request with the same error."""

    def __init__(self, error: Exception) -> None:
        super().__init__()
        self.error = error

    async def submit(self, *given: Any, **more: Any) -> AsyncGenerator[Update, None]:
        raise self.error
        yield


@pytest.mark.parametrize(
    ("status", "error"),
    [
        (422, Poisonous("it crashed the engine")),
        (429, Overloaded("the queue is full")),
        (503, EngineFailed("the engine is gone")),
        (504, DeadlineExceeded("the answer was not complete")),
    ],
)
def test_refusals_are_described(document: dict[str, Any], status: int, error: Exception) -> None:
    with serve(Service(Refusing(error), TOKENIZER, ["some"])) as url:
        for path, asked in ASKED.items():
            for stream in (False, True):
                answer = httpx2.post(url + path, json=asked | {"stream": stream}, timeout=60)
                assert answer.status_code == status, answer.text
                check(document, path, answer)


@pytest.mark.parametrize("path", ASKED)
def test_what_the_endpoint_refuses_is_described(document: dict[str, Any], path: str) -> None:
    asked = ASKED[path]
    settings = ApiSettings(api_keys=("key",), max_body_bytes=200)
    impatient = settings.model_copy(update={"body_timeout_s": 0.2})

    def slowly() -> Iterator[bytes]:
        yield b"{"
        time.sleep(0.6)
        yield b"}"

    given: dict[int, dict[str, Any]] = {
        400: {"json": asked | {"temperature": -1}},
        401: {"json": asked, "headers": {}},
        404: {"json": asked | {"model": "nothing"}},
        408: {"content": slowly(), "headers": KEY | {"Content-Type": "application/json"}},
        413: {"json": {"prompt": "a" * 300}},
        415: {"content": b"{}"},
    }
    service = Service(Recorder(), TOKENIZER, ["demo"])
    with serve(service, settings) as url, serve(service, impatient) as impatient_url:
        for status, options in given.items():
            base = impatient_url if status == 408 else url
            answer = httpx2.post(base + path, **({"headers": KEY} | options))
            assert answer.status_code == status, answer.text
            check(document, path, answer)
            (media,) = document["paths"][path]["post"]["responses"][str(status)]["content"].values()
            example = media["example"]["error"]
            assert answer.json()["error"] | {"message": ""} == example | {"message": ""}
            if status in (400, 401, 404, 415):
                assert answer.json()["error"]["message"] == example["message"]
        absent = httpx2.get(url + "/v1/models/nothing", headers=KEY)
        assert absent.status_code == 404
        check(document, "/v1/models/{name}", absent)


@pytest.mark.parametrize("keys", [(), ("key",)])
@pytest.mark.parametrize("operators", [(), ("other",)])
def test_only_operators_operate_and_a_server_says_which_keys_it_needs(
    document: dict[str, Any], keys: tuple[str, ...], operators: tuple[str, ...]
) -> None:
    settings = ApiSettings(api_keys=keys, operator_keys=operators)
    shown = {"nobody": {}, "client": KEY, "operator": {"x-api-key": "other"}}
    shown["same"] = {"Authorization": "Bearer other"}
    # Where there are keys of clients, others are asked for one before all else.
    no_key, no_operator = (401, "invalid_api_key"), (403, "no_operator")
    refused = {who: no_key if keys or operators else no_operator for who in shown}
    if keys:
        refused["client"] = (403, "not_an_operator") if operators else no_operator
    needed: list[Any] = [{"bearer": []}, {"header": []}]
    with serve(Service(Recorder(), None, ["some"]), settings) as url:
        found = httpx2.get(f"{url}/openapi.json").json()
        assert ("securitySchemes" in found["components"]) == bool(keys or operators)
        assert found.get("security", []) == needed * len(keys)
        for path, method, operation in operations(found):
            own = needed * len(operators) if path in OPERATED else []
            assert operation.get("security", []) == own
            for who, headers in shown.items() if path in OPERATED else ():
                answer = httpx2.request(method, url + path, headers=headers)
                if operators and who in ("operator", "same"):
                    assert answer.status_code not in (401, 403)  # the body is what is wrong
                    continue
                check(document, path, answer)
                assert (answer.status_code, answer.json()["error"]["code"]) == refused[who]
        models = httpx2.get(f"{url}/v1/models", headers=shown["operator"])
        assert models.status_code == (401 if keys and not operators else 200)


def test_the_page_shows_all_of_it_with_its_own_style(document: dict[str, Any]) -> None:
    with serve(Service(Recorder(), None, ["some"])) as url:
        answer = httpx2.get(f"{url}/docs")
    (style,) = re.findall(r"<style>(.*?)</style>", answer.text, re.DOTALL)
    digest = b64encode(sha256(style.encode()).digest()).decode()
    assert f"style-src 'sha256-{digest}'" in answer.headers["content-security-policy"]
    assert not re.search("<script|https?://", answer.text)
    text = unescape(re.sub(r"<[^>]*>", "", answer.text))
    for path, method, operation in operations(document):
        assert f"{method.upper()} {path}" in text and operation["summary"] in text
        for status, told in operation["responses"].items():
            assert status in text and told["description"].replace("`", "") in text
    for name, schema in document["components"]["schemas"].items():
        assert f'id="{name}"' in answer.text
        for field in schema.get("properties", {}):
            assert field in text
    assert '"decoder": {"kind": "credit"}' in text and '"cache": {"kind": "exact"}' in text
    for link in re.findall(r'href="#([^"]*)"', answer.text):
        assert f'id="{link}"' in answer.text, link
