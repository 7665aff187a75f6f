"""OpenAI's own JavaScript client, in a project of its own."""

import json
import subprocess
from pathlib import Path
from typing import Any

from tests.helpers.needed import needed, npm

SCRIPT = """
import OpenAI from "openai";

const [baseURL, apiKey, messages] = [process.argv[2], process.argv[3], JSON.parse(process.argv[4])];
const client = new OpenAI({ baseURL, apiKey, maxRetries: 0 });
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


def npm_project(folder: Path) -> Path:
    """Install the client into a folder; the test ends here where that cannot be."""
    needed("node")
    (folder / "package.json").write_text('{"private": true, "type": "module"}')
    (folder / "ask.js").write_text(SCRIPT)
    npm(folder, "install", "--no-audit", "--no-fund", "openai")
    return folder


def npm_told(folder: Path, url: str, messages: Any, key: str = "none") -> dict[str, Any]:
    """Ask the model `demo`, streamed and whole, and return what the client made of it."""
    command = ["node", "ask.js", f"{url}/v1", key, json.dumps(messages)]
    made = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=120)
    assert made.returncode == 0, made.stderr
    told: dict[str, Any] = json.loads(made.stdout)
    return told
