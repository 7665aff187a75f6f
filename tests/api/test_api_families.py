"""Families over HTTP: requests of many policies at once, answered as alone."""

import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx2
import pytest

from benchmarks.golden import Case, cases_of, params_of
from diffray import SamplingParams
from diffray.components.checkpoints.info import describe
from tests.helpers.api_server import Served, events, serve_model
from tests.helpers.paths import GOLDEN
from tests.helpers.tiny import tiny_checkpoint

pytestmark = [pytest.mark.slow, pytest.mark.rotate(2)]

SAMPLED: list[dict[str, Any]] = [
    {"temperature": 0.8, "diffusion": {"decoder": {"kind": "threshold", "threshold": 0.3}}},
    {"temperature": 1, "top_p": 0.9, "diffusion": {"decoder": "sequential", "block_length": 8}},
    {"diffusion": {"decoder": "credit", "block_length": 16}},
    {"diffusion": {"decoder": "hierarchy", "iteration": "soft"}},
    {"temperature": 0.5, "diffusion": {"decoder": "fixed", "speculation": {"kind": "verify"}}},
    {"presence_penalty": 1, "diffusion": {"decoder": "threshold", "cache": "none"}},
    {"temperature": 1.3, "n": 2, "stop": ["word1", "word3"]},
    {"prompt": "What is 7 plus 12?", "temperature": 0.9, "n": 3, "max_tokens": 5},
]


@pytest.fixture(scope="module", params=["sdar", "sdar_moe", "fast_dllm_v2", "dream"])
def served(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Served]:
    model = tiny_checkpoint(tmp_path_factory.mktemp("tiny") / "model", request.param)
    with serve_model(model, request.param, draft_overhead=10_000) as served:
        yield served


def mixed(cases: list[Case]) -> list[dict[str, Any]]:
    """Return one golden case of each policy, and requests that draw or are penalized."""
    cases = [case for case in cases if not case.get("bad_token_ids")]  # HTTP does not take them
    kinds = {str(case["decoder"]) + str(case.get("cache")): case for case in cases}
    found = [
        params_of(case).model_dump(mode="json", exclude_unset=True, exclude={"n", "bad_token_ids"})
        | {"prompt": case["prompt"], "temperature": 0}
        for case in [*kinds.values(), *random.Random(1).sample(cases, 4)]
    ]
    own = {"max_tokens": 21, "ignore_eos": True, "seed": 7}
    return found + [own | {"prompt": [9, 8, 7 + at]} | each for at, each in enumerate(SAMPLED)]


Told = tuple[list[list[int]], list[str], int, int]


def ask(http: httpx2.Client, body: dict[str, Any]) -> Told:
    """Return of each choice its tokens and its text, and how many tokens were read and written."""
    answer = http.post("/v1/completions", json=body | {"return_token_ids": True})
    assert answer.status_code == 200, answer.text
    parts = events(answer.text) if "stream" in body else [answer.json()]
    assert len({part["id"] for part in parts}) == 1
    count, usage = body.get("n", 1), parts[-1]["usage"]
    tokens: list[list[int]] = [[] for _ in range(count)]
    texts = [""] * count
    for choice in (choice for part in parts for choice in part["choices"]):
        tokens[choice["index"]].extend(choice.get("token_ids", ()))
        texts[choice["index"]] += choice["text"]
    return tokens, texts, usage["prompt_tokens"], usage["completion_tokens"]


def test_models_tells_what_info_does(served: Served) -> None:
    told = httpx2.get(f"{served.url}/v1/models").json()["data"][0]
    info = describe(GOLDEN / served.name)
    assert (told["family"], told["diffusion"]) == (info.family, info.diffusion)
    assert told["policies"] == info.policies and told["policies"]["source"]


def test_all_policies_at_once_are_answered_as_alone(served: Served) -> None:
    cases = cases_of(served.name)
    bodies = mixed(cases)
    assert len(bodies) > 10
    watch = {"stream": True, "stream_options": {"include_usage": True}}
    asked = [body | more for body in bodies for more in ({}, watch)]
    with (
        httpx2.Client(base_url=served.url, timeout=300) as http,
        ThreadPoolExecutor(len(asked)) as threads,
    ):
        answers = list(threads.map(lambda body: ask(http, body), asked))
    whole, streamed = answers[::2], answers[1::2]
    assert whole == streamed
    for body, told in zip(bodies, whole, strict=True):
        params = SamplingParams(**{name: body[name] for name in body if name != "prompt"})
        (alone,) = served.llm.generate([body["prompt"]], params, use_tqdm=False)
        expected = [[getattr(c, name) for c in alone.outputs] for name in ("token_ids", "text")]
        assert told == (*expected, alone.prompt_tokens, alone.completion_tokens), body
    originals = [[case["tokens"]] for case in cases]
    assert sum(tokens in originals for tokens, *_ in whole) >= len(bodies) - len(SAMPLED)
