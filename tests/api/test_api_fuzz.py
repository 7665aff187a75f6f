"""Whatever is sent, the answer is an answer or a refusal: no 5xx, and the engine lives on."""

import random
from collections.abc import Iterator

import httpx2
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.helpers.api_server import Served, serve_model
from tests.helpers.tiny import CHAT_TEMPLATE, tiny_checkpoint
from tools.fuzz.cases import Case
from tools.fuzz.run import Prober, probe
from tools.fuzz.values import diffusion

pytestmark = pytest.mark.slow
SEEDS = st.integers(0, 2**32)
SLOWEST = 60.0  # seconds, on a machine that does other things too; by hand it is 5


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


@settings(max_examples=10)
@given(seed=SEEDS)
def test_no_request_breaks_the_server(served: Served, seed: int) -> None:
    found = probe(served.url, range(20), seed=seed, slowest=SLOWEST, heavy=False)
    assert found.faults == []


@settings(max_examples=30)
@given(seed=SEEDS)
def test_no_policy_breaks_the_engine(served: Served, seed: int) -> None:
    rng = random.Random(seed)
    max_tokens = rng.randint(1, 40)
    body = {"prompt": "abc", "diffusion": diffusion(rng), "max_tokens": max_tokens}
    body |= {"temperature": rng.choice((0, 1, 100)), "ignore_eos": True, "logprobs": 2, "n": 2}
    answer = httpx2.post(f"{served.url}/v1/completions", json=body, timeout=120)
    assert answer.status_code in (200, 400), answer.text
    assert httpx2.get(f"{served.url}/health").status_code == 200
    if answer.status_code == 200:
        assert answer.json()["usage"]["completion_tokens"] == 2 * max_tokens


@pytest.mark.long
def test_cases_are_answered_or_refused(served: Served) -> None:
    findings = probe(served.url, range(450), seed=11, slowest=SLOWEST)
    assert findings.faults == []
    statuses = {outcome for _, outcome in findings.answers}
    assert {"200", "200 stream", "400", "404", "413", "415"} <= statuses


@pytest.mark.long
@pytest.mark.rotate(1)
def test_what_the_openapi_document_suggests_is_answered_or_refused(served: Served) -> None:
    pytest.importorskip("schemathesis")
    from tools.fuzz.from_schema import probe_from_schema

    findings = probe_from_schema(served.url, 12, seed=11, slowest=SLOWEST)
    assert findings.faults == [] and findings.requests >= 60


@pytest.mark.long
def test_faults_are_reported(served: Served) -> None:
    prober = Prober(served.url, slowest=0.0)
    prober.try_case(Case("report", "GET", "/version"), "the name")
    assert prober.findings.faults[0].startswith("the name (report): an answer after")
