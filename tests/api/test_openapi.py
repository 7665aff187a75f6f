"""The OpenAPI document says what the endpoints read, and the endpoints refuse what they should."""

import json
import re
import time
from base64 import b64encode
from collections.abc import AsyncGenerator, Iterator
from hashlib import sha256
from typing import Any

import httpx2
import pytest

from diffray.cluster.api.http_app import build_api
from diffray.cluster.api.openapi import BODIES, EXAMPLES
from diffray.cluster.api.operations import OPERATED
from diffray.cluster.api.service import Service
from diffray.cluster.api.settings import ApiSettings
from diffray.cluster.control.engine_client import (
    DeadlineExceeded,
    EngineFailed,
    Overloaded,
    Poisonous,
)
from diffray.workers.messages import Update
from tests.helpers.api_server import serve
from tests.helpers.byte_tokenizer import TOKENIZER
from tests.helpers.recorder import Recorder

CHAT, COUNT = "/v1/chat/completions", "/v1/messages/count_tokens"
CONVERSATION = {"messages": [{"role": "user", "content": "abc"}]}
ASKED: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "abc"},
    "/v1/responses": {"input": "abc"},
    "/v1/messages": CONVERSATION,
}
KEY = {"Authorization": "Bearer key"}


@pytest.fixture(scope="module")
def document() -> dict[str, Any]:
    return build_api(lambda: Service(Recorder(), None, ["some"])).openapi()


def operations(document: dict[str, Any]) -> Iterator[tuple[str, str, dict[str, Any]]]:
    for path, found in document["paths"].items():
        for method, operation in found.items():
            yield path, method, operation


def test_every_path_and_field_has_a_meaning(document: dict[str, Any]) -> None:
    schemas = document["components"]["schemas"]
    for name, schema in schemas.items():
        for field, about in schema.get("properties", {}).items():
            assert about.get("description") or "const" in about, f"{name}.{field}"
    for path, _, operation in operations(document):
        assert operation["description"] and operation["tags"], path
        assert "422" not in operation["responses"]
    found = set(re.findall(r'"#/components/schemas/(\w+)"', json.dumps(document)))
    assert found == set(schemas) == found | {body.__name__ for body in BODIES.values()}


@pytest.mark.parametrize("path", EXAMPLES)
def test_examples_are_answered_and_of_several_models_name_one(path: str) -> None:
    service = Service(Recorder(), TOKENIZER, ["some"])
    several = build_api(lambda: service, model="first").openapi()
    body = several["paths"][path]["post"]["requestBody"]["content"]["application/json"]
    assert body["example"] == {"model": "first", **EXAMPLES[path]}
    with serve(service) as url:
        answer = httpx2.post(url + path, json=EXAMPLES[path])
    assert answer.status_code == 200, answer.text


KNOWN: list[dict[str, Any]] = [{"best_of": 3}, {"lora": "a"}, {"suffix": 5}, {"thread": "a"}]
KNOWN += [{"temperature": "hot"}, {"diffusion": {"colour": 7}}, {"verbosity": "loud"}]


@pytest.mark.parametrize("path", [*ASKED, CHAT, COUNT, "/tokenize"])
def test_unknown_fields_are_ignored_on_request(path: str) -> None:
    """Not known ones with values that are not supported, nor those within an object."""
    asked = ASKED.get(path, CONVERSATION)
    odd: dict[str, Any] = {"max_token": 5, "\u2603\n": None} | {f"x{each}": [] for each in range(9)}
    service = Service(Recorder(), TOKENIZER, ["some"])
    with serve(service, ApiSettings(ignore_unknown_fields=True)) as url:
        told = httpx2.post(url + path, json=asked | odd).json()["warnings"]
        for stream in (False, True) if path in (*ASKED, CHAT) else ():
            answer = httpx2.post(url + path, json=asked | odd | {"stream": stream})
            assert answer.headers["x-diffray-warnings"] == "; ".join(told)
            assert told[0] in answer.text
        refused = [httpx2.post(url + path, json=asked | odd | each) for each in KNOWN]
        assert "warnings" not in httpx2.post(url + path, json=asked).json()
    assert told[0].startswith("the unknown field 'max_token' is ignored")
    assert told[1] == r"the unknown field '\u2603\n' is ignored"
    assert told[10:] == ["other unknown fields that are ignored: 1"]
    assert [each.status_code for each in refused] == [400] * len(KNOWN)


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
def test_refusals_of_the_engine_have_a_status(status: int, error: Exception) -> None:
    with serve(Service(Refusing(error), TOKENIZER, ["some"])) as url:
        for path, asked in ASKED.items():
            for stream in (False, True):
                answer = httpx2.post(url + path, json=asked | {"stream": stream}, timeout=60)
                assert answer.status_code == status, answer.text
                assert ("retry-after" in answer.headers) == (status in (429, 503))


@pytest.mark.parametrize("path", ASKED)
def test_refusals_of_the_endpoint_have_a_status(path: str) -> None:
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
            assert answer.json()["error"]["message"]
            assert answer.json().get("type") == ("error" if path == "/v1/messages" else None)


@pytest.mark.parametrize("keys", [(), ("key",)])
@pytest.mark.parametrize("operators", [(), ("other",)])
@pytest.mark.rotate(2)
def test_only_operators_operate_and_a_server_says_which_keys_it_needs(
    keys: tuple[str, ...], operators: tuple[str, ...]
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
                assert (answer.status_code, answer.json()["error"]["code"]) == refused[who]
        models = httpx2.get(f"{url}/v1/models", headers=shown["operator"])
        assert models.status_code == (401 if keys and not operators else 200)


def test_the_page_may_load_only_what_it_is_made_of() -> None:
    with serve(Service(Recorder(), None, ["some"]), prefix="/a") as url:
        page = httpx2.get(f"{url}/docs")
    policy = page.headers["content-security-policy"]
    (script,) = re.findall(r"<script>(.*?)</script>", page.text, re.DOTALL)
    assert f"'sha256-{b64encode(sha256(script.encode()).digest()).decode()}'" in policy
    assert "'openapi.json'" in script
    for loaded in re.findall(r'(?:src|href)="(https://[^/"]*)', page.text):
        assert loaded in policy
