"""What takes guidellm's place where it is not installed: it sends each prompt of a scenario once.

It reads the scenario that `diffray bench serve` writes and answers with a report of guidellm's
form, so that the tests see both sides of the seam. `tests/cli/test_bench_serve.py` runs the real
one too, where it is installed.
"""

import json
import sys
import time
from pathlib import Path
from typing import Any

import httpx2


def main(arguments: list[str]) -> None:
    told = Path(arguments[arguments.index("-c") + 1])
    spec = json.loads(told.read_text())["spec"]
    (data,) = spec["data"]
    count = spec["constraints"][0]["count"]
    if data["kind"] == "json_file":
        rows = [json.loads(line) for line in Path(data["path"]).read_text().splitlines()][:count]
    else:
        words = " ".join(["word"] * data["prompt_tokens"])
        rows = [{"prompt": words, "output_tokens_count": data["output_tokens"]}] * count
    begin = time.perf_counter()
    asked = [ask(spec["backend"], row) for row in rows]
    seconds = time.perf_counter() - begin
    good = [one for one in asked if one["info"]["error"] is None]
    metrics: dict[str, Any] = {"request_totals": {"errored": len(asked) - len(good)}}
    metrics["slo_attainment"] = 0.5 if spec["metrics"]["slo"] else None
    errored = [one for one in asked if one not in good]
    report = {
        "metrics": metrics,
        "duration": seconds,
        "requests": {"successful": good, "errored": errored},
    }
    for output in spec["outputs"]:
        Path(output["path"]).write_text(json.dumps({"benchmarks": [report]}))


def ask(backend: dict[str, Any], row: dict[str, Any]) -> dict[str, Any]:
    prompt, tokens = row["prompt"], row["output_tokens_count"]
    body: dict[str, Any] = {"model": backend["model"], "max_tokens": tokens}
    if backend["request_format"] == "/v1/completions":
        body["prompt"] = prompt
    else:
        body["messages"] = [{"role": "user", "content": prompt}]
    body |= backend["extras"]["body"]
    response = httpx2.post(backend["target"] + backend["request_format"], json=body)
    error = None if response.status_code == 200 else f"HTTPStatusError({response.status_code})"
    usage = response.json()["usage"] if error is None else {}
    return {
        "info": {"error": error},
        "time_to_first_token_ms": None if prompt == "empty" else 0.5,
        "inter_token_latency_ms": 0.25,
        "request_latency": 2.0,
        "input_metrics": {"text_tokens": usage.get("prompt_tokens")},
        "output_metrics": {"text_tokens": usage.get("completion_tokens")},
    }


if __name__ == "__main__":
    main(sys.argv[1:])
