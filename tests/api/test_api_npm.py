"""OpenAI's own JavaScript client streams from the endpoint."""

from pathlib import Path

import pytest

from diffray import SamplingParams
from tests.helpers.api_server import serve_model
from tests.helpers.npm_client import npm_project, npm_told

pytestmark = pytest.mark.slow

MESSAGES = [{"role": "user", "content": "What is 8 plus 5?"}]


def test_the_npm_client_streams(tmp_path: Path) -> None:
    folder = npm_project(tmp_path)
    with serve_model("demo") as served:
        told = npm_told(folder, served.url, MESSAGES)
        (expected,) = served.llm.chat(MESSAGES, SamplingParams(max_tokens=40))
    output = expected.outputs[0]
    assert told["text"] == told["whole"] == output.text
    assert told["role"] == "assistant"
    assert told["reason"] == output.finish_reason
    assert told["usage"] == told["wholeUsage"]
    assert told["usage"]["completion_tokens"] == expected.completion_tokens
    assert told["models"] == ["demo", "demo-alias"]
    assert told["refused"] == ["NotFoundError", 404, "model_not_found"]
