"""guidellm as the load generator: its scenario, its process, and its report."""

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from math import isinf
from pathlib import Path
from statistics import fmean, median, pstdev
from typing import Any

from diffray.cluster.cli.bench.datasets import RANDOM, Data, Row
from diffray.cluster.cli.bench.results import percentile

OUTPUT_LEN = 128
# vLLM's names and guidellm's: its inter-token latency leaves out the first token, as TPOT does.
LATENCIES = {
    "ttft": ("time_to_first_token_ms", 1.0),
    "tpot": ("inter_token_latency_ms", 1.0),
    "e2el": ("request_latency", 1e3),
}


def profile(rate: float, at_once: int | None) -> dict[str, Any]:
    """Return the arrival pattern in guidellm's terms."""
    if not isinf(rate):
        return {"kind": "poisson", "rate": [rate], "max_concurrency": at_once}
    if at_once is not None:
        return {"kind": "concurrent", "streams": [at_once]}
    return {"kind": "throughput", "max_concurrency": None}  # without the key it is refused


def backend(name: str, data: Data, body: dict[str, Any], **server: str | None) -> dict[str, Any]:
    """Return how to send a data set: random prompts as completions, others as chats."""
    is_random = name == RANDOM
    # guidellm times text only, and what answers random prompts may be end tokens alone.
    extras = {"ignore_eos": True, "skip_special_tokens": False}
    return {
        "kind": "openai_http",
        "request_format": "/v1/completions" if is_random else "/v1/chat/completions",
        "verify": True,
        "extras": {"body": (extras if is_random else {"ignore_eos": data.ignore_eos}) | body},
    } | server


def longest_request(scenario: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """Return the path and the body of a scenario's longest request, without streaming."""
    backend, (data,) = scenario["backend"], scenario["data"]
    body = {"model": backend["model"]} | backend["extras"]["body"]
    if data["kind"] == "json_file":
        rows = [json.loads(line) for line in Path(data["path"]).read_text().splitlines()]
        row = max(rows, key=lambda row: len(row["prompt"]))
        body["messages"] = [{"role": "user", "content": row["prompt"]}]
        body["max_tokens"] = row["output_tokens_count"]
    else:
        prefixes = data["prefix_buckets"] or []
        length = data["prompt_tokens"] + sum(each["prefix_tokens"] for each in prefixes)
        body |= {"prompt": [1] * length, "max_tokens": data["output_tokens"]}
    return backend["request_format"], body


def write_data(
    folder: Path,
    name: str,
    rows: Sequence[Row],
    data: Data,
    tokenizer: str,
    context: int | None,
) -> dict[str, Any]:
    """Return the prompts in guidellm's terms; write those of a data set to the folder."""
    if name == RANDOM:
        from diffray.components.checkpoints.folder import resolve

        output_len = data.output_len or OUTPUT_LEN
        prefix = {"prefix_count": 1, "prefix_tokens": data.random_prefix_len}
        synthetic = {
            "kind": "synthetic_text",
            "prompt_tokens": data.random_len(context, output_len),
            "output_tokens": output_len,
            "prefix_buckets": [prefix] if data.random_prefix_len else None,
        }
        processor = {"kind": "huggingface_auto", "model": str(resolve(tokenizer))}
        return {"data": [synthetic], "tokenizer": processor}
    path = folder / "prompts.jsonl"
    with path.open("w") as file:
        for row in rows:
            length = data.output_len or row.max_tokens or OUTPUT_LEN
            line = {"prompt": row.prompt, "output_tokens_count": length}
            file.write(json.dumps(line) + "\n")
    return {"data": [{"kind": "json_file", "path": str(path)}]}


def run_guidellm(scenario: dict[str, Any], folder: Path, kept: Path | None) -> dict[str, Any]:
    """Run guidellm once and return its benchmark; `kept` is a path for its own reports."""
    report, config = folder / "report.json", folder / "scenario.json"
    outputs = [{"kind": "json", "path": str(report)}]
    if kept is not None:
        outputs += [{"kind": kind, "path": f"{kept}.{kind}"} for kind in ("json", "html")]
    config.write_text(json.dumps({"spec": scenario | {"outputs": outputs}}))
    # Each of its worker processes draws the same gaps, so with several of them arrivals are not
    # a Poisson process (guidellm 0.8.1).
    settings = os.environ | {"GUIDELLM__MAX_WORKER_PROCESSES": "1"}
    command = [sys.executable, "-m", "guidellm", "run", "-c", str(config), "--disable-console"]
    done = subprocess.run(command, env=settings, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    if done.returncode or not report.exists():
        lines = done.stdout.decode(errors="replace").strip().splitlines()
        raise ValueError(f"guidellm failed: {' '.join(lines[-3:])[-500:] or done.returncode}")
    (benchmark,) = json.loads(report.read_text())["benchmarks"]
    return dict(benchmark)


def summary(benchmark: dict[str, Any]) -> dict[str, Any]:
    """Return a run's numbers under the names that `vllm bench serve` gives them."""
    metrics, seconds = benchmark["metrics"], benchmark["duration"]
    good = benchmark["requests"]["successful"]
    read, written = (
        sum(request[side]["text_tokens"] or 0 for request in good)
        for side in ("input_metrics", "output_metrics")
    )
    attained = metrics.get("slo_attainment")
    found: dict[str, Any] = {
        "duration": seconds,
        "completed": len(good),
        "failed": metrics["request_totals"]["errored"],
        "total_input_tokens": read,
        "total_output_tokens": written,
        "request_throughput": len(good) / seconds,
        "request_goodput": None if attained is None else attained * len(good) / seconds,
        "output_throughput": written / seconds,
        "total_token_throughput": (read + written) / seconds,
    }
    for name, (theirs, scale) in LATENCIES.items():
        # guidellm's own averages count an answer without text as one with a time of 0.
        times = [scale * request[theirs] for request in good if request[theirs] is not None]
        if times:
            found[f"mean_{name}_ms"] = fmean(times)
            found[f"median_{name}_ms"] = median(times)
            found[f"std_{name}_ms"] = pstdev(times)
            found[f"p99_{name}_ms"] = percentile(times, 99)
    return found
