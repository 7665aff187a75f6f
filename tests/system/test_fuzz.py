"""A short run of tools/fuzz: no answer of 500 or more, no hang, nothing left behind."""

from collections.abc import Iterator

import pytest

from tests.helpers.api_server import Served, serve_model
from tests.helpers.tiny import CHAT_TEMPLATE, tiny_checkpoint
from tools.fuzz.cases import Case
from tools.fuzz.run import Prober, probe

pytestmark = pytest.mark.long

SLOWEST = 60.0  # seconds, on a machine that does other things too; by hand it is 5


@pytest.fixture(scope="module", params=["llada", "llada2_moe"])
def served(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("fuzz") / "model"
    model = tiny_checkpoint(folder, request.param, chat_template=CHAT_TEMPLATE)
    with serve_model(model, "tiny", max_model_len=64, draft_overhead=10_000) as served:
        yield served


def test_cases_are_answered_or_refused(served: Served) -> None:
    findings = probe(served.url, range(450), seed=11, slowest=SLOWEST)
    assert findings.faults == []
    statuses = {outcome for _, outcome in findings.answers}
    assert {"200", "200 stream", "400", "404", "413", "415"} <= statuses


def test_what_the_openapi_document_suggests_is_answered_or_refused(served: Served) -> None:
    pytest.importorskip("schemathesis")
    from tools.fuzz.from_schema import probe_from_schema

    findings = probe_from_schema(served.url, 12, seed=11, slowest=SLOWEST)
    assert findings.faults == []
    assert findings.requests >= 60


def test_faults_are_reported(served: Served) -> None:
    prober = Prober(served.url, slowest=0.0)
    prober.try_case(Case("report", "GET", "/version"), "the name")
    assert prober.findings.faults[0].startswith("the name (report): an answer after")
