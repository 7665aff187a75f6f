"""The endpoint's edges, by plain HTTP: what is refused and how, keys, limits, streams' bytes."""

import json
import re
import time
from collections import defaultdict
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx2
import pytest
from prometheus_client.parser import text_string_to_metric_families

import diffray
from diffray import SamplingParams
from diffray.cluster.api.fields import NOTED
from diffray.cluster.api.settings import ApiSettings
from diffray.cluster.api.tokens import MASK
from tests.helpers import api_server
from tests.helpers.api_server import Served, serve, serve_model
from tests.helpers.tiny import CHAT_TEMPLATE, tiny_checkpoint

CHAT, COMPLETE = "/v1/chat/completions", "/v1/completions"
JSON = {"Content-Type": "application/json"}
HELLO = {"messages": [{"role": "user", "content": "hello"}]}
ABC = {"prompt": "abc", "max_tokens": 8, "temperature": 0}
CALL = {"type": "function", "id": "c1", "function": {"name": "add", "arguments": '{"a": 1}'}}
LONG = {"prompt": "abc", "max_tokens": 96, "ignore_eos": True, "diffusion": {"block_length": 8}}


@pytest.fixture(scope="module")
def http(tiny: Served) -> Iterator[httpx2.Client]:
    with httpx2.Client(base_url=tiny.url, timeout=60) as http:
        yield http


def refusal(answer: httpx2.Response, status: int = 400) -> dict[str, Any]:
    assert answer.status_code == status, answer.text
    error: dict[str, Any] = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert isinstance(error["message"], str) and error["message"]
    return error


def events(answer: httpx2.Response) -> list[Any]:
    assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert answer.headers["cache-control"] == "no-cache"
    return api_server.events(answer.text)


# Of both endpoints: a field, or its place below `diffusion`, and values that it cannot have.
WRONG: dict[str, list[Any]] = {
    "temperature": [-0.1, "hot", False],
    "n": [0, 129, 10**30],
    "max_tokens": [0, "16", True, 1.5],
    "stop": ["", [1], ["x"] * 33],
    "stop_token_ids": [[10**20]],
    "allowed_token_ids": [[10**6]],
    "logit_bias": [{"abc": 1}, {"5": 101}, [1]],
    "bad_words": [["x", ""], [chr(n) * 99 for n in range(33, 99)]],
    "stream": ["yes"],
    "stream_options": [{"include_usage": True}],  # without a stream
    "priority": [2**40],
    "model": [5],
    "no_repeat_ngram_size": [2, -1],
    "prompt_logprobs": [0],
    "length_penalty": [True],
    "verbosity": ["loud"],
    "thinking": [{"type": "enabled"}],
    "reasoning_effort": [5],
    "functions": [[{}]],
    "best_of": [True, 3],
    "response_format.type": ["json"],
    "tools": [[{"type": "function"}]],
    "tool_choice": ["required"],
    "metadata": ["a"],
    "request_id": ["a b"],
    "use_beam_search": [True],
    "colour": ["red"],
    "diffusion": [7],
    "diffusion.block_length": [10**30],
    "diffusion.decoder": [{"kind": "magic"}, {"threshold": 0.5}],
    "diffusion.decoder.threshold": [7],
    "diffusion.decoder.colour": [7],
    "diffusion.cache": [{"kind": "exact"}],
}
TOGETHER: list[tuple[str, dict[str, Any]]] = [
    ("min_tokens", {"min_tokens": 9, "max_tokens": 8}),
    ("stream_options.other", {"stream": True, "stream_options": {"other": 1}}),
    ("diffusion.cfg_scale", {"diffusion": {"iteration": {"kind": "soft"}, "cfg_scale": 1.5}}),
]


def body_with(field: str, value: Any) -> dict[str, Any]:
    """Return a body in which a field has a value; a decoder's fields stand beside its kind."""
    first, *others = field.split(".")
    if not others:
        return {first: value}
    kind = {"kind": "threshold"} if first == "decoder" else {}
    return {first: kind | body_with(".".join(others), value)}


@pytest.mark.parametrize(
    ("param", "body"),
    [*((f, body_with(f, value)) for f, values in WRONG.items() for value in values), *TOGETHER],
)
def test_both_name_an_invalid_field(http: httpx2.Client, param: str, body: dict[str, Any]) -> None:
    for path, base in ((CHAT, HELLO), (COMPLETE, {"prompt": "abc"})):
        error = refusal(http.post(path, json=base | body))
        assert (error["type"], error["param"]) == ("invalid_request_error", param), error


PROMPTS: list[Any] = [[], {}, ["a", 1], [1.5], ["a"] * 1025, [-1], ""]
AUDIO = {"type": "input_audio", "input_audio": {}}
NO_JSON = CALL | {"function": {"name": "add", "arguments": "a=1"}}


def said(role: str, **more: Any) -> dict[str, Any]:
    return {"messages": [{"role": role, **more}]}


# Of one endpoint: a body, the field that is named, and other words of the message.
REFUSED: list[tuple[str, dict[str, Any], str]] = [
    (CHAT, {}, "messages"),
    (CHAT, {"messages": []}, "messages"),
    (CHAT, said("king", content="x"), "messages[0].role"),
    (CHAT, said("user", content=None), "messages[0].content"),
    (CHAT, said("user", content=[{"type": "image_url"}]), "messages[0].content"),
    (CHAT, said("user", content=[AUDIO]), "messages[0].content"),
    (CHAT, said("user", content="x", tool_calls=[CALL]), "messages[0].tool_calls"),
    (CHAT, said("assistant", content="x", tool_calls=[{}]), "messages[0].tool_calls"),
    (CHAT, said("assistant", tool_calls=[NO_JSON]), "messages[0].tool_calls"),
    (CHAT, said("user", content="x", tool_call_id="c1"), "messages[0].tool_call_id"),
    (CHAT, said("user", content="x", mood="fine"), "messages[0].mood"),
    (CHAT, HELLO | {"top_logprobs": 2}, "top_logprobs"),
    (CHAT, HELLO | {"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    (CHAT, HELLO | {"max_tokens": 3, "max_completion_tokens": 4}, "max_completion_tokens"),
    (CHAT, HELLO | {"echo": True}, "echo"),
    (CHAT, HELLO | {"continue_final_message": True}, "continue_final_message"),
    (CHAT, HELLO | {"chat_template_kwargs": {"tokenize": 1}}, "chat_template_kwargs.tokenize"),
    *((COMPLETE, {"prompt": wrong}, "prompt") for wrong in PROMPTS),
    (COMPLETE, {}, "prompt"),
    (COMPLETE, ABC | {"logprobs": 21}, "logprobs"),
    (COMPLETE, ABC | {"logprobs": 0, "echo": True, "stream": True}, "stream"),
    (COMPLETE, ABC | {"logprobs": 0, "echo": True, "suffix": "c"}, "suffix"),
    (COMPLETE, ABC | {"max_completion_tokens": 4}, "max_completion_tokens"),
    ("/tokenize", {}, "prompt"),
    ("/tokenize", {"prompt": "a", "messages": HELLO["messages"]}, "prompt"),
    ("/detokenize", {"tokens": [10**30]}, "tokens"),
    ("/detokenize", {"tokens": "abc"}, "tokens"),
    ("/detokenize", {"text": "abc", "tokens": []}, "text"),
    (COMPLETE, ABC | {"lora": "mine"}, "lora | the adapter's name as model"),
    (COMPLETE, ABC | {"max_token": 1}, "max_token | did you mean 'max_tokens'?"),
    (COMPLETE, ABC | {"steps": 8}, 'steps | {"decoder": {"kind": "fixed", "steps": ...}}'),
    (COMPLETE, ABC | {"diffusion": {"decoder": "creditt"}}, "diffusion.decoder | mean 'credit'?"),
    (COMPLETE, ABC | {"prompt_logprobs": 1}, "prompt_logprobs | send echo: true with logprobs"),
    # Megabytes.
    (COMPLETE, {"prompt": "<|mask|>" * 10**6}, "prompt"),
    (COMPLETE, {"prompt": [1] * 3_000_000}, "prompt"),
    (COMPLETE, {"prompt": "a", "suffix": "b" * 10**6}, "suffix"),
    (COMPLETE, {"prompt": ["a"] * 1000, "n": 128}, "n"),
    (COMPLETE, {"prompt": "a", "allowed_token_ids": ["a"] * 10**6}, "allowed_token_ids"),
    (COMPLETE, {"prompt": "a", "diffusion": {"x" * 10**6: 1}}, ""),
    (COMPLETE, {"prompt": "a", "max_tokens": 10**4200}, "max_tokens"),
    (COMPLETE, {"x" * 10**6: 1}, ""),
    (CHAT, {"messages": [1] * 3_000_000}, "messages"),
    (CHAT, HELLO | {"chat_template_kwargs": {"a": [[[{}]]] * 100_000}}, ""),
    ("/tokenize", {"prompt": "a" * 7_000_000}, "prompt"),
    ("/detokenize", {"tokens": [1] * 2_000_000}, "tokens"),
]


@pytest.mark.parametrize(("path", "body", "words"), REFUSED)
def test_one_names_it_too(http: httpx2.Client, path: str, body: dict[str, Any], words: str) -> None:
    param, *said = words.split(" | ")
    begin = time.monotonic()
    error = refusal(http.post(path, json=body))
    assert time.monotonic() - begin < 30  # some tenths of a second, on a machine that is free
    assert error["param"] == param or not param
    assert [each for each in said if each not in error["message"]] == []
    assert len(error["message"]) <= 650 and len(error["param"] or "") <= 210


NEUTRAL: dict[str, Any] = {
    "presence_penalty": 0.0, "repetition_penalty": 1, "best_of": 1, "temperature": 0,
}  # fmt: skip
NEUTRAL |= {"response_format": {"type": "text"}, "tools": None, "logit_bias": None, "stop": None}
NEUTRAL |= {"user": "somebody", "store": True, "metadata": {"run": "7"}, "service_tier": "flex"}
NEUTRAL |= {"reasoning_effort": "high", "verbosity": "low", "include_reasoning": False}
NEUTRAL |= {"functions": [], "function_call": "auto", "prediction": {}, "length_penalty": 2}


def test_neutral_values_and_null_change_nothing(http: httpx2.Client) -> None:
    plain = http.post(COMPLETE, json=ABC).json()["choices"]
    assert http.post(COMPLETE, json=ABC | NEUTRAL).json()["choices"] == plain
    fields = http.get("/openapi.json").json()["components"]["schemas"]["ChatBody"]["properties"]
    listed = {name: about.get("enum", [None])[-1] for name, about in fields.items()}
    assert listed["verbosity"] == "high" and listed["functions"] == []
    assert fields["prediction"] == {"type": "object", "description": NOTED}
    said, noted = (http.post(CHAT, json=HELLO | more).json() for more in ({}, listed | HELLO))
    assert said["choices"] == noted["choices"]
    zeros = '{"temperature": -0.0, "logit_bias": {"5": -0.0, "007": 0}, '
    zeros += '"prompt": "abc", "max_tokens": 8, "diffusion": {"cfg_scale": -0.0}}'
    assert http.post(COMPLETE, content=zeros, headers=JSON).json()["choices"] == plain


@pytest.mark.parametrize(
    "content",
    [
        b"", b"{", b"[1]", b"null", b"\xff\xfe", b'{"prompt": "abc", "temperature": NaN}',
        b'{"prompt": "abc", "temperature": Infinity}',
        b'{"prompt": "abc", "diffusion": {"cfg_scale": 1e999}}',
        b'{"prompt": "half of a pair: \\ud800"}',
        b'{"prompt": "abc", "seed": ' + b"9" * 5000 + b"}", b'{"prompt": ' + b"[" * 100_000,
        b'{"prompt": "abc", "prompt": "abc"}',
        b'{"prompt": "abc", "diffusion": {"block_length": 8, "block_length": 8}}',
        b'{"prompt": "abc", "logit_bias": ' + b'{"1":' * 100 + b"1" + b"}" * 101, b"\xef\xbb\xbf{}",
        '{"prompt": "abc"}'.encode("utf-16"),
    ],
)  # fmt: skip
def test_bodies_must_be_json_objects(http: httpx2.Client, content: bytes) -> None:
    for path in (CHAT, COMPLETE, "/tokenize", "/detokenize"):
        code = refusal(http.post(path, content=content, headers=JSON))["code"]
        assert code == (None if content in (b"[1]", b"null") else "invalid_json")


def test_models_paths_and_methods_must_be_known(http: httpx2.Client) -> None:
    for path, base in ((CHAT, HELLO), (COMPLETE, ABC), ("/tokenize", {"prompt": "a"})):
        error = refusal(http.post(path, json=base | {"model": "gpt-9"}), 404)
        assert (error["param"], error["code"]) == ("model", "model_not_found")
    assert refusal(http.get("/v1/models/some/where"), 404)["code"] == "model_not_found"
    unknown = refusal(http.get("/v1"), 404)
    assert unknown["type"] == "invalid_request_error"
    assert unknown["message"] == "Not Found (GET /v1); /docs lists the paths"
    refusal(http.get(CHAT), 405)
    # It may be left out, or have another name.
    assert http.post(COMPLETE, json=ABC).json()["model"] == "tiny"
    assert http.post(COMPLETE, json=ABC | {"model": "tiny-alias"}).json()["model"] == "tiny-alias"


def test_tokenize_and_detokenize(tiny: Served, http: httpx2.Client) -> None:
    tokenizer = tiny.llm.tokenizer
    assert tokenizer is not None
    text = "h\u00e9llo \u20ac"
    answer = http.post("/tokenize", json={"prompt": text, "return_token_strs": True}).json()
    ids = tokenizer.encode(text)
    assert (answer["tokens"], answer["count"]) == (ids, len(ids))
    assert answer["max_model_len"] == tiny.engine.limits.context
    assert len(answer["token_strs"]) == len(ids)
    assert http.post("/detokenize", json={"tokens": ids}).json() == {"prompt": text}
    chat = http.post("/tokenize", json=HELLO).json()
    assert chat["tokens"] == tokenizer.encode_chat(HELLO["messages"])
    ready = http.post("/tokenize", json=HELLO | {"add_generation_prompt": False}).json()
    assert ready["tokens"] == chat["tokens"]  # this template always adds it


def test_tokenizer_info_is_what_a_remote_tokenizer_needs(tiny: Served, http: httpx2.Client) -> None:
    info = http.get("/tokenizer_info").json()
    assert http.get("/tokenizer_info?api-version=1").json() == info  # as gateways ask
    assert info["eos_token"] == "<|end|>" and info["chat_template"] == CHAT_TEMPLATE
    assert info["bos_token"] is None and info["model_max_length"] == tiny.engine.limits.context
    assert "/" not in info["tokenizer_class"] and "name_or_path" not in info
    with serve(tiny.service, ApiSettings(api_keys=("key",))) as url:
        refusal(httpx2.get(f"{url}/tokenizer_info"), 401)
        assert httpx2.get(f"{url}/ping").status_code == 200


def test_answers_have_the_id_that_is_asked_for(http: httpx2.Client) -> None:
    named = http.post(COMPLETE, json=ABC | {"request_id": "mine-7"}).json()
    assert named["id"] == "cmpl-mine-7"
    for stream in (False, True):
        answer = http.post(CHAT, json=HELLO | {"request_id": "mine-8", "stream": stream})
        assert '"id":"chatcmpl-mine-8"' in answer.text


def test_reports(tiny: Served, http: httpx2.Client) -> None:
    health = http.get("/health")
    assert {http.head(path).status_code for path in ("/health", "/ping")} == {200}
    assert (health.status_code, health.content) == (200, b"")
    assert http.get("/version").json() == {"version": diffray.__version__}
    paths = http.get("/openapi.json").json()["paths"]
    reports = [paths[path]["get"]["responses"]["200"] for path in ("/metrics", "/health")]
    assert [set(each.get("content", ())) for each in reports] == [{"text/plain"}, set()]
    (model, _) = http.get("/v1/models").json()["data"]
    assert model["max_model_len"] == tiny.engine.limits.context
    assert model["diffusion"]["decoder"] == {"kind": "threshold", "threshold": 0.9}


def test_metrics_count_what_was_answered(tiny: Served, http: httpx2.Client) -> None:
    def values() -> dict[str, float]:
        found = http.get("/metrics")
        assert found.headers["content-type"].startswith("text/plain; version=0.0.4")
        families = text_string_to_metric_families(found.text)
        samples = [sample for family in families for sample in family.samples]
        assert {sample.labels["model_name"] for sample in samples} == {"tiny"}
        sums: dict[str, float] = defaultdict(float)
        for sample in samples:
            if "le" not in sample.labels:
                sums[sample.name] += sample.value
        return sums

    http.post(COMPLETE, json=ABC)
    before = values()
    body = ABC | {"ignore_eos": True, "n": 2, "max_tokens": 12}
    usage = http.post(COMPLETE, json=body).json()["usage"]
    refusal(http.post(COMPLETE, json={}))
    after = values()
    grown = {name: after[name] - before[name] for name in after}
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (3, 24)
    expected = {
        "prompt_tokens_total": 3, "generation_tokens_total": 24,
        "diffusion_num_committed_tokens_total": 24, "time_to_first_token_seconds_count": 2,
        "request_success_total": 2, "request_refused_total": 1, "request_params_n_sum": 2,
    }  # fmt: skip
    assert {name: grown[f"diffray:{name}"] for name in expected} == expected
    steps = grown["diffray:diffusion_num_denoising_steps_total"]
    assert 2 <= steps <= 28 and steps / 2 <= grown["diffray:num_forwards_total"] <= steps + 2
    tokens = "diffray:iteration_tokens_total"
    assert grown[f"{tokens}_sum"] == 24 and grown[f"{tokens}_count"] >= 2
    assert after["diffray:num_requests_running"] == 0
    with serve(tiny.service, ApiSettings(vllm_metric_names=True)) as url:
        assert "vllm:num_requests_waiting" in httpx2.get(f"{url}/metrics").text


UNPRINTABLE = [b"Bearer", b"bearer\tkey", b"Bearer k\xe9y", b"B" * 9000]


def test_keys(tiny: Served) -> None:
    wrong = [[], *([(b"Authorization", each)] for each in (b"Bearer no", b"Basic a", *UNPRINTABLE))]
    with serve(tiny.service, ApiSettings(api_keys=("a", "b"))) as url:
        for headers in wrong:
            for path in ("/v1/models", "/load", "/nothing"):
                answer = httpx2.get(url + path, headers=headers)
                assert refusal(answer, 401)["code"] == "invalid_api_key"
                assert answer.headers["www-authenticate"] == "Bearer"
            for path in ("//health", "/health/", "/v1/models?x=/health", "/metrics/../load"):
                assert httpx2.get(url + path, headers=headers).status_code in (401, 404)
        refusal(httpx2.post(url + CHAT, json=HELLO), 401)
        for key in ("a", "b"):
            header = {"Authorization": f"Bearer {key}"}
            assert httpx2.get(f"{url}/v1/models", headers=header).status_code == 200
        for path in ("/health", "/metrics", "/version", "/docs", "/openapi.json"):
            assert httpx2.get(url + path).status_code == 200
        for keys, status in ((("a", "wrong"), 200), (("wrong", "a"), 401)):  # the first counts
            shown = [("x-api-key", key) for key in keys]
            assert httpx2.get(f"{url}/load", headers=shown).status_code == status


def test_browsers_are_let_in_only_on_request(tiny: Served, http: httpx2.Client) -> None:
    asking = {"Origin": "http://a.example", "Access-Control-Request-Method": "POST"}
    assert "access-control-allow-origin" not in http.options(CHAT, headers=asking).headers
    settings = ApiSettings(cors_origins=("http://a.example",), api_keys=("key",))
    with serve(tiny.service, settings) as url:
        preflight = httpx2.options(url + CHAT, headers=asking)
        assert preflight.headers["access-control-allow-origin"] == "http://a.example"
        refused = httpx2.get(f"{url}/v1/models", headers={"Origin": "http://a.example"})
        assert refused.status_code == 401
        assert refused.headers["access-control-allow-origin"] == "http://a.example"


def test_bodies_have_a_limit(tiny: Served) -> None:
    largest = json.dumps(ABC).encode().ljust(1000)
    with serve(tiny.service, ApiSettings(max_body_bytes=1000)) as url:
        answer = httpx2.post(url + COMPLETE, content=largest + b" ", headers=JSON)
        assert refusal(answer, 413)["code"] == "request_too_large"
        assert httpx2.post(url + COMPLETE, content=largest, headers=JSON).status_code == 200


@pytest.mark.slow
def test_a_full_queue_is_429(http: httpx2.Client) -> None:
    """Two run, one waits, five arrive; refused requests count as no traffic."""
    names = "prompt_tokens_total request_aborted_total request_params_n_count".split()
    names += ["request_prompt_tokens_sum", "prefix_cache_queries_total"]

    def counted() -> list[float]:
        text = http.get("/metrics").text
        found = [re.findall(rf"^diffray:{name}{{.*}} (.*)", text, re.M) for name in names]
        return [sum(map(float, values)) for values in found]

    before = counted()
    with ThreadPoolExecutor(5) as clients:
        answers = list(clients.map(lambda _: http.post(COMPLETE, json=LONG), range(5)))
    refused = [answer for answer in answers if answer.status_code != 200]
    assert len(refused) == 2
    for answer in refused:
        assert refusal(answer, 429)["code"] == "rate_limit_exceeded"
        assert int(answer.headers["retry-after"]) >= 1
    prompt = 3 * len("abc")
    grown = [now - then for now, then in zip(counted(), before, strict=True)]
    assert grown == [prompt, 0, 3, prompt, prompt]
    whole = http.post(COMPLETE, json=ABC | {"n": 9})  # more than the queue holds, one by one
    assert len(whole.json()["choices"]) == 9


def test_streams_are_early_and_tell_their_usage(http: httpx2.Client) -> None:
    """With a block at a time the first text is there long before the last."""
    body = LONG | {"max_tokens": 30, "temperature": 0, "stream": True, "return_token_ids": True}
    usage = {"include_usage": True, "continuous_usage_stats": True}
    *chunks, last = events(http.post(COMPLETE, json=body | {"stream_options": usage}))
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert counts == sorted(counts) and counts[-1] == 30
    sizes = [len(choice.get("token_ids", ())) for chunk in chunks for choice in chunk["choices"]]
    assert sum(sizes) == 30 and max(sizes) <= 16
    assert last["choices"] == [] and last["usage"] == chunks[-1]["usage"]
    whole = http.post(COMPLETE, json=body | {"stream": False}).json()
    assert whole["usage"] == last["usage"]
    plain = events(http.post(COMPLETE, json=body))
    assert all("usage" not in chunk and "diffusion" not in chunk for chunk in plain)
    assert {choice["finish_reason"] for choice in plain[-1]["choices"]} == {"length"}


def test_trajectory_and_ids_on_request(tiny: Served, http: httpx2.Client) -> None:
    asked: dict[str, Any] = LONG | {"max_tokens": 24, "temperature": 1, "seed": 4}
    params = {name: asked[name] for name in asked if name != "prompt"}
    (expected,) = tiny.llm.generate("abc", SamplingParams(**params, logprobs=True))
    output = expected.outputs[0]
    body = asked | {"return_trajectory": True, "return_token_ids": True}
    (choice,) = http.post(COMPLETE, json=body).json()["choices"]
    assert choice["prompt_token_ids"] == expected.prompt_token_ids
    assert choice["logprobs"] is None  # a separate option
    chunks = events(http.post(COMPLETE, json=body | {"stream": True}))
    parts = [c["trajectory"] for chunk in chunks for c in chunk["choices"] if "trajectory" in c]
    whole = choice["trajectory"]
    assert whole["token_ids"] == choice["token_ids"] == output.token_ids
    assert whole["steps"] == output.steps and whole["logprobs"] == pytest.approx(output.logprobs)
    for name in ("token_ids", "steps", "logprobs"):
        assert [each for part in parts for each in part[name]] == whole[name]


def test_canvas_on_request(http: httpx2.Client) -> None:
    body = LONG | {"max_tokens": 40, "stream": True, "return_token_ids": True, "seed": 1}
    chunks = events(http.post(COMPLETE, json=body | {"stream_options": {"include_canvas": True}}))
    views = [chunk for chunk in chunks if "diffusion" in chunk]
    assert views and all(view["choices"] == [] for view in views)
    for view in (view["diffusion"] for view in views):
        canvas, tokens = view["canvas"], view["tokens"]
        assert len(canvas) == len(tokens) == 40
        assert [text is None for text in tokens] == [token is None for token in canvas]
        assert view["text"].count(MASK) == canvas.count(None)
    masks = [view["diffusion"]["canvas"].count(None) for view in views]
    assert masks == sorted(masks, reverse=True) and masks[0] > 0
    forwards = [view["diffusion"]["forwards"] for view in views]
    assert forwards == sorted(set(forwards)) and forwards[0] == 1
    plain = events(http.post(COMPLETE, json=body))
    assert [chunk["choices"] for chunk in plain] == [c["choices"] for c in chunks if c["choices"]]


@pytest.mark.slow
def test_an_engine_that_dies_ends_its_streams_with_an_error_and_then_is_503(tmp_path: Path) -> None:
    model = tiny_checkpoint(tmp_path / "dying")
    with serve_model(model, "tiny") as served, httpx2.Client(base_url=served.url) as http:
        assert "chat template" in refusal(http.post(CHAT, json=HELLO))["message"]
        with http.stream("POST", COMPLETE, json=LONG | {"stream": True, "n": 8}) as stream:
            lines = stream.iter_lines()
            first = next(lines)
            served.engine.close()
            *_, error, done = [first, *(line for line in lines if line)]
        assert json.loads(error.removeprefix("data: "))["error"]["code"] == "engine_unavailable"
        assert done == "data: [DONE]"
        assert refusal(http.get("/health"), 503)["code"] == "engine_unavailable"
        answer = http.post(COMPLETE, json=ABC)
        assert refusal(answer, 503)["type"] == "server_error"
        assert int(answer.headers["retry-after"]) >= 1
        refusal(http.post(COMPLETE, json=ABC | {"stream": True}), 503)
        assert http.get("/metrics").status_code == 200


# Any page can make a browser send these types to any server without a preflight request.
OTHER_TYPES = ("", "text/plain", "application/x-www-form-urlencoded", "multipart/form-data; b=x")


def test_other_content_types_are_refused(http: httpx2.Client) -> None:
    for kind in OTHER_TYPES:
        headers = {"Content-Type": kind} if kind else {}
        for path in (CHAT, COMPLETE, "/tokenize", "/detokenize"):
            error = refusal(http.post(path, content=b'{"prompt": "a"}', headers=headers), 415)
            assert "Content-Type: application/json" in error["message"]
    for kind in ("application/json; charset=utf-8", "Application/JSON"):
        answer = http.post(COMPLETE, content=json.dumps(ABC), headers={"Content-Type": kind})
        assert answer.status_code == 200


def test_odd_names_and_hosts_do_no_harm(http: httpx2.Client) -> None:
    body = ABC | {"model": "a\nb\u202e\x07"}
    assert refusal(http.post(COMPLETE, json=body), 404)["message"].isprintable()
    for path in ("/nothing%0Ahere", "/v1/models/a%0Ab"):
        assert refusal(http.get(path), 404)["message"].isprintable()
    for host in ("[", "[::1", "a:b:c", "x" * 500):
        for path, status in (("/nothing", 404), (f"{CHAT}/", 404), (CHAT, 405)):
            refusal(http.get(path, headers={"Host": host}), status)


def test_every_answer_restricts_browsers(http: httpx2.Client) -> None:
    answers = [http.get(path) for path in ("/health", "/v1/models", "/nothing")]
    answers += [http.post(COMPLETE, json=ABC | {"stream": stream}) for stream in (False, True)]
    for answer in answers:
        policy = answer.headers["content-security-policy"]
        assert policy.startswith("default-src 'none';") and "unsafe" not in policy
        assert "frame-ancestors 'none'" in policy
        assert answer.headers["x-content-type-options"] == "nosniff"


def test_logs_hold_no_prompts_texts_and_keys(
    tiny: Served,
    breaking_url: str,
    caplog: pytest.LogCaptureFixture,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """Answers, refusals, and a stream that fails; at INFO and below, of all loggers."""
    secret, key = "xylophone-secret", "key-of-somebody"
    headers = {"Authorization": f"Bearer {key}"}
    bodies: list[dict[str, Any]] = [
        {"prompt": secret, "max_tokens": 4, "echo": True},
        {"prompt": secret, "max_tokens": 4, "stream": True},
        {"prompt": secret, "max_tokens": 10**6},
        {"prompt": secret, "stop": [secret], "temperature": secret},
        {"prompt": secret, secret: secret},
        {"prompt": secret, "bad_words": [secret]},
    ]
    with (
        caplog.at_level("DEBUG"),
        serve(tiny.service, ApiSettings(api_keys=(key, f"{key}-2"))) as url,
    ):
        for body in bodies:
            httpx2.post(url + COMPLETE, json=body, headers=headers)
            httpx2.post(url + COMPLETE, json=body, headers={"Authorization": f"Bearer {key}x"})
        httpx2.post(url + CHAT, json={"messages": [{"role": secret}]}, headers=headers)
        httpx2.post(url + COMPLETE, content=secret, headers=headers | JSON)
        broken = httpx2.post(breaking_url + COMPLETE, json={"prompt": secret, "stream": True})
        assert '"text":"a"' in broken.text and '"internal_error"' in broken.text
    ours = [each for each in caplog.records if not each.name.startswith(("httpx", "httpcore"))]
    logged = "\n".join(f"{record.getMessage()} {record.exc_text or ''}" for record in ours)
    out, err = capfd.readouterr()
    for text in (logged, out, err):
        assert secret not in text and key not in text
