"""Requests that schemathesis makes up from the OpenAPI document: what it says is right, and not."""

import json
from typing import Any

import httpx2
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import seed as hypothesis_seed
from schemathesis.generation import GenerationMode

from tools.fuzz.cases import Case
from tools.fuzz.judge import Findings
from tools.fuzz.run import Prober


def probe_from_schema(
    url: str, examples: int, *, seed: int, slowest: float, proxied: bool = False
) -> Findings:
    """Try each operation with so many requests that fit its description, and as many others."""
    prober = Prober(url, slowest, proxied=proxied)
    document = httpx2.get(f"{url}/openapi.json").json()
    schema = schemathesis.openapi.from_dict(document)
    operations: list[Any] = list(schema.get_all_operations())
    for operation in (found.ok() for found in operations):
        if operation.method == "post":  # the others take nothing that could be wrong
            for mode in (GenerationMode.POSITIVE, GenerationMode.NEGATIVE):
                _try_operation(prober, operation, mode, examples, seed)
    prober.settle()
    return prober.findings


def _try_operation(
    prober: Prober, operation: Any, mode: GenerationMode, examples: int, seed: int
) -> None:
    kind = f"schema, {mode.value}"

    @hypothesis_seed(seed)
    @settings(
        max_examples=examples,
        deadline=None,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(made=operation.as_strategy(generation_mode=mode))
    def send(made: Any) -> None:
        sent = made.as_transport_kwargs(base_url="http://unused")
        body = sent["data"] if "data" in sent else json.dumps(sent.get("json")).encode()
        headers = {"Content-Type": "application/json"}
        name = f"{operation.label} {body[:200]!r}"
        prober.try_case(Case(kind, "POST", operation.path, body, headers), name)

    send()
