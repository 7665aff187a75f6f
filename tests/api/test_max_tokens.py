"""max_tokens is a limit: it changes no answer that is shorter, and a chat may ask for too many."""

import json
from collections.abc import Iterator
from contextlib import closing

import httpx2
import pytest

from benchmarks.golden import EOS, MASK
from diffray import DiffusionLLM
from diffray.cluster.api.params_builder import ParamsBuilder
from diffray.cluster.api.service import Service
from diffray.cluster.api.settings import GenerationDefaults
from diffray.cluster.control.local import LocalEngine
from diffray.components.mesh import Mesh
from diffray.components.policy import DiffusionParams
from diffray.workers.engine_options import EngineOptions
from diffray.workers.setup import build_rank
from tests.helpers.api_server import serve
from tests.helpers.paths import GOLDEN

LIMITS = 64, 96, 100, 128, 200, 256, 512, 900, 1024, 4096, 16384
QUESTIONS = (
    "What is 12 plus 30?",
    "Give job and age as JSON: Anna, 31, is a nurse from Rome.",
    "Anna has 28 pencils and gives away 9. How many pencils are left?",
)
CHAT, MESSAGES, RESPONSES = "/v1/chat/completions", "/v1/messages", "/v1/responses"
HEADER = "x-diffray-warnings"


@pytest.fixture(scope="module")
def llada2_url() -> Iterator[str]:
    llm = DiffusionLLM("demo-llada2", dtype="float32")
    with (
        LocalEngine(llm.engine) as engine,
        closing(Service(engine, llm.tokenizer, ["demo-llada2"])) as service,
        serve(service) as url,
    ):
        yield url


def post(url: str, path: str, limit: int | None, **more: object) -> httpx2.Response:
    asked = [{"role": "user", "content": QUESTIONS[0]}]
    if path == RESPONSES:
        body: dict[str, object] = {"input": asked, "max_output_tokens": limit}
    else:
        body = {"messages": asked, "max_tokens": limit}
    return httpx2.post(url + path, json=body | more)


@pytest.mark.parametrize("fixture", ["demo_url", "llada2_url"])
@pytest.mark.rotate(1)
def test_answers_are_equal_for_every_limit(fixture: str, request: pytest.FixtureRequest) -> None:
    url = request.getfixturevalue(fixture)
    for question in QUESTIONS:
        found = set()
        for limit in LIMITS:
            messages = [{"role": "user", "content": question}]
            choice = post(url, CHAT, limit, messages=messages).json()["choices"][0]
            found.add((choice["message"]["content"], choice["finish_reason"]))
        assert len(found) == 1
        assert {reason for _, reason in found} == {"stop"}


@pytest.mark.parametrize("path", [CHAT, MESSAGES, RESPONSES])
def test_what_the_context_has_no_room_for_is_lowered_and_said(
    path: str, demo_url: str, caplog: pytest.LogCaptureFixture
) -> None:
    answer = post(demo_url, path, 16384)
    (told,) = answer.json()["warnings"]
    field = "max_output_tokens" if path == RESPONSES else "max_tokens"
    assert told == answer.headers[HEADER] and told.removeprefix(field) in caplog.text
    assert told.startswith(f"{field} is lowered from 16384 to 10")
    assert "and the context 1024" in told
    with_room = post(demo_url, path, 900)
    assert "warnings" not in with_room.json() and HEADER not in with_room.headers
    stream = post(demo_url, path, 16384, stream=True)
    assert stream.headers[HEADER] == told
    events = [line.removeprefix("data: ") for line in stream.text.splitlines() if "data: {" in line]
    first = json.loads(events[0])
    assert (first.get("message") or first.get("response") or first)["warnings"] == [told]
    assert path != CHAT or not any("warnings" in event for event in events[1:])


def test_a_canvas_far_too_long_is_said(demo_url: str) -> None:
    long, growing, short = (
        post(demo_url, CHAT, limit, diffusion={"decoder": kind}).json()
        for limit, kind in ((900, "fixed"), (900, "threshold"), (64, "fixed"))
    )
    (told,) = long["warnings"]
    assert told.startswith("max_tokens (900) is the length of the canvas with decoder 'fixed'")
    assert "warnings" not in growing and "warnings" not in short
    fixed = {"decoder": "fixed"}
    chosen = post(demo_url, CHAT, 900, diffusion=fixed | {"canvas": "fixed"})
    endless = post(demo_url, CHAT, 900, diffusion=fixed, ignore_eos=True)
    default = post(demo_url, CHAT, None, diffusion=fixed)
    for each in (chosen, endless, default):
        assert "warnings" not in each.json()


def test_it_is_refused_on_request_and_in_completions(demo_url: str) -> None:
    strict = post(demo_url, CHAT, 16384, strict_max_tokens=True)
    assert strict.status_code == 400
    assert strict.json()["error"]["code"] == "context_length_exceeded"
    body = {"prompt": "def add(a, b):", "max_tokens": 16384}
    refused = httpx2.post(f"{demo_url}/v1/completions", json=body)
    assert refused.status_code == 400
    fixed = post(demo_url, CHAT, 16384, diffusion={"canvas": "fixed"})
    assert fixed.status_code == 400  # a shorter canvas would have another answer
    more = {"strict_max_tokens": False, "prompt": [[60, 61], [60] * 500], "max_tokens": 1000}
    lowered = httpx2.post(f"{demo_url}/v1/completions", json=body | more).json()
    assert lowered["warnings"] == [
        "max_tokens is lowered from 1000 to 524: prompt 1 has 500 tokens, and the context 1024"
    ]


def test_a_prompt_that_leaves_no_room_is_refused(demo_url: str) -> None:
    messages = [{"role": "user", "content": "one two " * 600}]
    answer = post(demo_url, CHAT, 16, messages=messages)
    assert answer.json()["error"]["code"] == "context_length_exceeded"


def test_an_answer_that_nothing_ends_has_the_length_as_its_reason(demo_url: str) -> None:
    answer = post(demo_url, CHAT, 200, ignore_eos=True).json()
    assert answer["choices"][0]["finish_reason"] == "length"
    assert answer["usage"]["completion_tokens"] == 200


def test_what_is_written_token_by_token_may_fill_the_context() -> None:
    options = EngineOptions(device="cpu", max_model_len=100, mask_token_id=MASK, eos_token_id=EOS)
    limits = build_rank(str(GOLDEN / "idlm"), options, Mesh()).limits
    builder = ParamsBuilder(limits, None, DiffusionParams(), GenerationDefaults())
    rooms = [builder.room(DiffusionParams(block_length=n), 7) for n in (1, 3, 10**6)]
    assert rooms == [93, 93, 93]
