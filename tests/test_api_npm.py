"""OpenAI's own JavaScript client streams from the endpoint."""

import json
import shutil
import subprocess
from pathlib import Path

import pytest

from diffray import SamplingParams
from tests.api_server import serve_model

pytestmark = pytest.mark.slow

MESSAGES = [{"role": "user", "content": "What is 8 plus 5?"}]
SCRIPT = """
import OpenAI from "openai";

const [baseURL, messages] = [process.argv[2], JSON.parse(process.argv[3])];
const client = new OpenAI({ baseURL, apiKey: "none", maxRetries: 0 });
const asked = { model: "demo", messages, temperature: 0, max_tokens: 40 };
const stream = await client.chat.completions.create({
  ...asked, stream: true, stream_options: { include_usage: true },
});
let text = "", usage = null, reason = null, role = null;
for await (const chunk of stream) {
  role ??= chunk.choices[0]?.delta.role;
  text += chunk.choices[0]?.delta.content ?? "";
  reason ??= chunk.choices[0]?.finish_reason;
  usage = chunk.usage ?? usage;
}
const whole = await client.chat.completions.create(asked);
const models = (await client.models.list()).data.map((model) => model.id);
const refused = await client.chat.completions.create({ ...asked, model: "other" }).catch((e) => e);
console.log(JSON.stringify({
  text, usage, reason, role, models, whole: whole.choices[0].message.content,
  wholeUsage: whole.usage, refused: [refused.constructor.name, refused.status, refused.code],
}));
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A project of its own, with the client in it."""
    if shutil.which("node") is None or shutil.which("npm") is None:
        pytest.skip("needs node and npm, which are not installed")
    folder = tmp_path_factory.mktemp("npm")
    (folder / "package.json").write_text('{"private": true, "type": "module"}')
    (folder / "ask.js").write_text(SCRIPT)
    command = ["npm", "install", "--no-audit", "--no-fund", "--silent", "openai"]
    try:
        made = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=120)
    except subprocess.TimeoutExpired:
        pytest.skip("npm could not fetch the package openai within 120 s")
    if made.returncode != 0:
        pytest.skip(f"npm could not fetch the package openai: {made.stderr.strip()[-200:]}")
    return folder


def test_the_npm_client_streams(folder: Path) -> None:
    with serve_model("demo") as served:
        command = ["node", "ask.js", f"{served.url}/v1", json.dumps(MESSAGES)]
        made = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=120)
        assert made.returncode == 0, made.stderr
        told = json.loads(made.stdout)
        (expected,) = served.llm.chat(MESSAGES, SamplingParams(max_tokens=40))
    output = expected.outputs[0]
    assert told["text"] == told["whole"] == output.text
    assert told["role"] == "assistant"
    assert told["reason"] == output.finish_reason
    assert told["usage"] == told["wholeUsage"]
    assert told["usage"]["completion_tokens"] == expected.completion_tokens
    assert told["models"] == ["demo", "demo-alias"]
    assert told["refused"] == ["NotFoundError", 404, "model_not_found"]
