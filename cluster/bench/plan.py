"""What a benchmark of a server is told to do, checked before anything is sent."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from secrets import token_hex
from typing import Any

from diffray.cluster.bench.arrivals import RampUp, arrivals
from diffray.cluster.bench.percentiles import counts, numbers
from diffray.cluster.bench.requests import ENDPOINTS
from diffray.cluster.bench.result_file import pairs
from diffray.cluster.bench.serving_result import Wanted, read_goodput
from diffray.cluster.endpoint import Endpoint
from diffray.cluster.request_options import request_options


@dataclass(frozen=True, slots=True)
class Plan:
    """What to send, where, when, and what to tell of it; everything typed has been checked."""

    backend: str
    server: Endpoint
    path: str
    model: str | None
    tokenizer: str | None
    headers: dict[str, str]
    id_prefix: str
    ready_timeout: float
    datasets: list[str]
    file: Path | None
    count: int
    input_len: int
    output_len: int | None
    seed: int
    rates: list[float]
    burstiness: float
    concurrencies: list[int | None]
    warmups: int
    ramp: RampUp | None
    common: dict[str, Any]
    wanted: Wanted
    progress: bool

    @staticmethod
    def of(
        *,
        backend: str,
        url: str,
        endpoint: str | None,
        model: str | None,
        tokenizer: str | None,
        api_key: str | None,
        headers: list[str],
        id_prefix: str | None,
        ready_timeout: float,
        dataset: str,
        path: Path | None,
        count: int,
        input_len: int,
        output_len: int | None,
        seed: int,
        rates: str,
        burstiness: float,
        concurrencies: str | None,
        warmups: int,
        ramp: tuple[str | None, float | None, float | None],
        typed: Mapping[str, object],
        settings: list[str],
        extra_body: str | None,
        metrics: str,
        percents: str,
        goodput: list[str],
        progress: bool,
    ) -> "Plan":
        if backend not in ENDPOINTS:
            raise ValueError(f"--backend is {backend!r}; allowed: {', '.join(ENDPOINTS)}")
        limits = counts(concurrencies, "--max-concurrency") if concurrencies else []
        plan = Plan(
            backend=backend,
            server=Endpoint.at(url, api_key),
            path=endpoint or ENDPOINTS[backend],
            model=model,
            tokenizer=tokenizer,
            headers=pairs(headers, "--header"),
            id_prefix=f"bench-{token_hex(4)}-" if id_prefix is None else id_prefix,
            ready_timeout=ready_timeout,
            datasets=dataset.split(","),
            file=path,
            count=count,
            input_len=input_len,
            output_len=output_len,
            seed=seed,
            rates=numbers(rates, "--request-rate"),
            burstiness=burstiness,
            concurrencies=[*limits] or [None],
            warmups=warmups,
            ramp=_ramp(*ramp, rates),
            common=request_options(typed, settings) | _json(extra_body),
            wanted=Wanted(
                tuple(metrics.split(",")),
                tuple(numbers(percents, "--metric-percentiles", high=100)),
                read_goodput([pair for typed in goodput for pair in typed.split()]),
            ),
            progress=progress,
        )
        for rate in plan.rates:
            plan.offsets(1, rate)  # refuses a wrong rate before anything is sent
        return plan

    def offsets(self, count: int, rate: float) -> list[float]:
        return arrivals(count, rate, burstiness=self.burstiness, ramp=self.ramp, seed=self.seed)

    def facts(self) -> dict[str, str]:
        return {
            "server": self.server.url + self.path,
            "prompts": f"{', '.join(self.datasets)}; at most {self.count} each",
            "arrivals": f"burstiness {self.burstiness:g}, seed {self.seed}",
            "asked": json.dumps(self.common),
        }


def _ramp(
    strategy: str | None, start: float | None, end: float | None, rates: str
) -> RampUp | None:
    if strategy is None:
        if start is not None or end is not None:
            raise ValueError("--ramp-up-start-rps and --ramp-up-end-rps need --ramp-up-strategy")
        return None
    if start is None or end is None:
        raise ValueError("--ramp-up-strategy needs --ramp-up-start-rps and --ramp-up-end-rps")
    if rates != "inf":
        raise ValueError("--ramp-up-strategy sets the rate; leave out --request-rate")
    return RampUp(strategy, start, end)


def _json(typed: str | None) -> dict[str, Any]:
    if typed is None:
        return {}
    try:
        found = json.loads(typed)
    except ValueError as error:
        raise ValueError(f"--extra-body is no JSON: {error}") from None
    if not isinstance(found, dict):
        raise ValueError("--extra-body must be a JSON object")
    return found
