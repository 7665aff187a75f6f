"""A batch under the faults of a run: at its end each request must have its answer, once."""

import asyncio
import json
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import httpx2

from tools.chaos.system import System
from tools.chaos.workload import Json, Question, Tally

_ENDS_S = 300.0  # after the last fault


@asynccontextmanager
async def answered(
    system: System, asked: list[Question], lines: int, tally: Tally
) -> AsyncIterator[None]:
    """Begin a batch of so many requests; at the end wait for it, and compare its answers."""
    async with httpx2.AsyncClient(base_url=system.served.url, timeout=60) as http:
        name = await _begin(http, system.model, asked, lines)
        yield
        batch = await _ended(http, name)
        if batch["status"] != "completed":
            tally.bad("lost", f"the batch is {batch['status']}: {batch['request_counts']}")
            return
        for file in (batch["output_file_id"], batch["error_file_id"]):
            if file is not None:
                content = (await http.get(f"/v1/files/{file}/content")).text
                _compare([json.loads(line) for line in content.splitlines()], asked, tally)
        if missing := lines - tally.counts["of the batch"]:
            tally.bad("lost" if missing > 0 else "duplicated", f"{missing} answers of the batch")


async def _begin(http: httpx2.AsyncClient, model: str, asked: list[Question], lines: int) -> str:
    content = ""
    for number in range(lines):
        body = asked[number % len(asked)].body | {"model": model, "stream": False}
        line = {"custom_id": str(number), "method": "POST", "url": "/v1/completions", "body": body}
        content += json.dumps(line) + "\n"
    form = {"files": {"file": ("in.jsonl", content.encode())}, "data": {"purpose": "batch"}}
    file = (await http.post("/v1/files", **form)).json()["id"]  # type: ignore[arg-type]
    wanted = {
        "input_file_id": file, "endpoint": "/v1/completions", "completion_window": "24h",
    }  # fmt: skip
    return str((await http.post("/v1/batches", json=wanted)).json()["id"])


async def _ended(http: httpx2.AsyncClient, name: str) -> Json:
    end = time.monotonic() + _ENDS_S
    while True:
        batch: Json = (await http.get(f"/v1/batches/{name}")).json()
        over = batch["status"] in ("completed", "failed", "expired", "cancelled")
        if over or time.monotonic() > end:
            return batch
        await asyncio.sleep(0.5)


def _compare(answers: list[Json], asked: list[Question], tally: Tally) -> None:
    for answer in answers:
        tally.counts["of the batch"] += 1
        number, response = int(answer["custom_id"]), answer["response"]
        if response is None or response["status_code"] != 200:
            tally.bad("lost", f"request {number} of the batch: {response or answer['error']}")
            continue
        if response["body"]["choices"][0]["token_ids"] != asked[number % len(asked)].ids:
            tally.bad("altered", f"request {number} of the batch")
