"""docs/configuration.md is what the models say, and bodies of requests take no more than they."""

from typing import Any

import pytest

from diffray.cluster.api.bodies import ChatBody, CompletionBody
from diffray.components.params import SamplingParams
from tools.configuration_page import PAGE, page


@pytest.mark.skipif(not PAGE.parent.exists(), reason="the tests stand alone, without the docs")
def test_the_page_is_current() -> None:
    assert PAGE.read_text() == page(), "run `make docs`"


def test_every_option_has_a_description() -> None:
    rows = [line for line in page().splitlines() if line.startswith("| `")]
    assert len(rows) > 90
    assert [row for row in rows if row.endswith("|  |")] == []


@pytest.mark.parametrize("body", [ChatBody, CompletionBody])
def test_a_body_allows_no_value_that_the_engine_would_refuse(body: Any) -> None:
    """A body is stricter: null stands for a default, and numbers are bounded on both sides."""
    common = SamplingParams.model_fields.keys() & body.model_fields.keys()
    assert {"n", "max_tokens", "min_tokens", "temperature", "top_p", "top_k", "seed"} <= common
    for name in common - {"logprobs", "logit_bias"}:  # their own types say what they are
        bounds = SamplingParams.model_fields[name].metadata
        assert {*map(repr, bounds)} <= {*map(repr, body.model_fields[name].metadata)}, name
