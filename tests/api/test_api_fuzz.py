"""Whatever is sent, the answer is an answer or a refusal: no 5xx, and the engine lives on."""

import json
from collections.abc import Iterator
from typing import Any

import httpx2
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from diffray.cluster.api.bodies import ChatBody, CompletionBody
from tests.helpers.api_server import Served, serve_model
from tests.helpers.tiny import CHAT_TEMPLATE, tiny_checkpoint
from tools.fuzz.values import KINDS, PARAMETERS

pytestmark = pytest.mark.slow

ODD = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.sampled_from([-1, 0, 1, 2, 2**31, 2**63, -(2**63) - 1, 10**40, 1e308, -1.5, 1e-320]),
    st.floats(allow_nan=True, allow_infinity=True),
    st.text(max_size=8),
)
ANYTHING = st.recursive(
    ODD,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner),
    max_leaves=5,
)
PART = st.fixed_dictionaries(
    {"kind": st.sampled_from(KINDS)},
    optional={
        name: st.sampled_from([0, 1, 2, 0.5, 1.0, 10**6, 2**31 - 1, -1, "x"]) for name in PARAMETERS
    },
)
DIFFUSION = st.fixed_dictionaries(
    {},
    optional={
        "block_length": st.sampled_from([1, 3, 8, 64, 10**6, 2**31 - 1, 0, "8"]),
        "cfg_scale": st.sampled_from([0, 0.5, 3, 1e9, -1]),
        "speculation": st.sampled_from([None, {"kind": "verify"}, {"kind": "verify", "drafts": 0}]),
        "decoder": PART,
        "cache": PART,
        "iteration": PART,
    },
)
# Values that are often right, so that some bodies get through to the engine.
LIKELY: dict[str, st.SearchStrategy[Any]] = {
    "messages": st.lists(
        st.fixed_dictionaries(
            {"role": st.sampled_from(["user", "assistant", "king"]), "content": st.text() | ODD}
        ),
        max_size=3,
    ),
    "prompt": st.one_of(
        st.text(min_size=1),
        st.lists(st.text(min_size=1), min_size=1, max_size=3),
        st.lists(st.integers(-1, 520), max_size=9),
        st.lists(st.lists(st.integers(0, 511), min_size=1, max_size=5), min_size=1, max_size=3),
    ),
    "max_tokens": st.integers(1, 12),
    "min_tokens": st.integers(0, 12),
    "n": st.integers(1, 3),
    "temperature": st.floats(0, 100),
    "top_p": st.floats(0, 1),
    "top_k": st.integers(-1, 600),
    "min_p": st.floats(0, 1),
    "presence_penalty": st.floats(-2, 2),
    "frequency_penalty": st.floats(-2, 2),
    "repetition_penalty": st.floats(0, 100),
    "no_repeat_ngram_size": st.integers(0, 3),
    "seed": st.integers(-(2**63), 2**63 - 1),
    "stop": st.text(max_size=3) | st.lists(st.text(max_size=3), max_size=3),
    "stop_token_ids": st.lists(st.integers(-1, 520), max_size=3),
    "allowed_token_ids": st.lists(st.integers(-1, 520), max_size=3),
    "logit_bias": st.dictionaries(st.integers(-1, 520).map(str), st.floats(-101, 101)),
    "bad_words": st.lists(st.text(max_size=2), max_size=2),
    "stream_options": st.dictionaries(
        st.sampled_from(["include_usage", "continuous_usage_stats", "include_canvas"]),
        st.booleans(),
    ),
    "logprobs": st.booleans() | st.integers(0, 21),
    "top_logprobs": st.integers(0, 21),
    "diffusion": DIFFUSION,
    "suffix": st.text(max_size=5),
    "chat_template_kwargs": st.dictionaries(st.text(max_size=5), ODD, max_size=2),
}
FIELDS = sorted({*ChatBody.model_fields, *CompletionBody.model_fields, "tools", "other"})


def value_of(name: str) -> st.SearchStrategy[Any]:
    likely = LIKELY.get(name, st.booleans())
    return st.one_of(likely, likely, likely, ANYTHING)


ALWAYS = ("prompt", "messages", "max_tokens")


def body_with(names: list[str]) -> st.SearchStrategy[dict[str, Any]]:
    """Return bodies with these fields; the ones that are always there are likely to be right."""
    likely = {name: LIKELY[name] for name in ALWAYS}
    return st.fixed_dictionaries(likely | {name: value_of(name) for name in names})


BODY = st.lists(st.sampled_from(FIELDS), max_size=4, unique=True).flatmap(body_with)


@pytest.fixture(
    scope="module", params=["llada", pytest.param("llada2_moe", marks=pytest.mark.long)]
)
def served(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("fuzz") / "model"
    model = tiny_checkpoint(folder, request.param, chat_template=CHAT_TEMPLATE)
    with serve_model(model, "tiny", max_model_len=64, draft_overhead=10_000) as served:
        yield served


def post(served: Served, path: str, body: dict[str, Any]) -> httpx2.Response:
    if path.startswith("/v1"):
        body.pop("messages" if path.endswith("/completions") and "chat" not in path else "prompt")
    headers = {"content-type": "application/json"}
    return httpx2.post(served.url + path, content=json.dumps(body), headers=headers, timeout=120)


@settings(max_examples=100, suppress_health_check=list(HealthCheck))
@given(
    path=st.sampled_from(["/v1/chat/completions", "/v1/completions", "/tokenize", "/detokenize"]),
    body=BODY,
)
def test_no_body_breaks_the_server(served: Served, path: str, body: dict[str, Any]) -> None:
    answer = post(served, path, dict(body))
    assert answer.status_code in (200, 400, 404, 429), answer.text
    assert httpx2.get(f"{served.url}/health").status_code == 200
    if answer.status_code != 200:
        assert set(answer.json()["error"]) == {"message", "type", "param", "code"}
    elif answer.headers["content-type"].startswith("text/event-stream"):
        assert '"error"' not in answer.text.rpartition("\n\ndata: [DONE]")[0][-400:]


@settings(max_examples=60, suppress_health_check=list(HealthCheck))
@given(diffusion=DIFFUSION, max_tokens=st.integers(1, 40), temperature=st.floats(0, 100))
def test_no_policy_breaks_the_engine(
    served: Served, diffusion: dict[str, Any], max_tokens: int, temperature: float
) -> None:
    body = {"prompt": "abc", "diffusion": diffusion, "max_tokens": max_tokens}
    body |= {"temperature": temperature, "ignore_eos": True, "logprobs": 2, "n": 2}
    answer = httpx2.post(f"{served.url}/v1/completions", json=body, timeout=120)
    assert answer.status_code in (200, 400), answer.text
    assert httpx2.get(f"{served.url}/health").status_code == 200
    if answer.status_code == 200:
        assert answer.json()["usage"]["completion_tokens"] == 2 * max_tokens
