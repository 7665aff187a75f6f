"""What a benchmark of a server is told to do, checked before anything is sent."""

import json
from dataclasses import dataclass
from secrets import token_hex
from typing import Any

from diffray.cluster.cli.bench.arrivals import RampUp, arrivals
from diffray.cluster.cli.bench.flags import Data
from diffray.cluster.cli.bench.percentiles import counts, numbers
from diffray.cluster.cli.bench.prompts import RANDOM, Ask, read_sets
from diffray.cluster.cli.bench.requests import CHAT, COMPLETIONS, ENDPOINTS
from diffray.cluster.cli.bench.result_file import pairs
from diffray.cluster.cli.bench.serve_flags import Server, Telling, Traffic, Wishes
from diffray.cluster.cli.bench.serving_result import Wanted, read_goodput
from diffray.cluster.cli.endpoint import Endpoint
from diffray.cluster.cli.flags import Diffusion, Sampling, typed_request
from diffray.cluster.cli.request_options import request_options


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
    datasets: list[tuple[str, list[Ask]]]
    count: int
    input_len: int
    prefix_len: int
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
        server: Server,
        data: Data,
        traffic: Traffic,
        telling: Telling,
        *,
        backend: str,
        seed: int,
        common: dict[str, Any],
        progress: bool,
    ) -> "Plan":
        at_once = traffic.max_concurrency
        limits = counts(at_once, "--max-concurrency") if at_once else []
        prefix = server.request_id_prefix
        plan = Plan(
            backend=backend,
            server=Endpoint.at(server.url, server.api_key),
            path=server.endpoint or ENDPOINTS[backend],
            model=server.model,
            tokenizer=server.tokenizer,
            headers=pairs(server.header or [], "--header"),
            id_prefix=f"bench-{token_hex(4)}-" if prefix is None else prefix,
            ready_timeout=server.ready_check_timeout_sec,
            datasets=read_sets(data),
            count=data.num_prompts,
            input_len=data.input_len,
            prefix_len=data.random_prefix_len,
            output_len=data.output_len,
            seed=seed,
            rates=numbers(traffic.request_rate, "--request-rate"),
            burstiness=traffic.burstiness,
            concurrencies=[*limits] or [None],
            warmups=traffic.num_warmups,
            ramp=_ramp(traffic),
            common=common,
            wanted=_wanted(telling),
            progress=progress,
        )
        for rate in plan.rates:
            plan.offsets(1, rate)  # refuses a wrong rate before anything is sent
        return plan

    def offsets(self, count: int, rate: float) -> list[float]:
        return arrivals(count, rate, burstiness=self.burstiness, ramp=self.ramp, seed=self.seed)

    @property
    def runs(self) -> int:
        return len(self.datasets) * len(self.rates) * len(self.concurrencies)

    def facts(self) -> dict[str, str]:
        return {
            "server": self.server.url + self.path,
            "prompts": f"{', '.join(name for name, _ in self.datasets)}; at most {self.count} each",
            "arrivals": f"burstiness {self.burstiness:g}, seed {self.seed}",
            "asked": json.dumps(self.common),
        }


def choose_backend(server: Server, data: Data) -> str:
    """Return the backend that was typed, else the one that fits the endpoint or the prompts.

    A data set's prompts are questions: sent as plain text, chat models go on writing the question
    or end at once. Random prompts are ids, which chats do not take.
    """
    if server.backend is not None:
        if server.backend not in ENDPOINTS:
            raise ValueError(f"--backend is {server.backend!r}; allowed: {', '.join(ENDPOINTS)}")
        return server.backend
    if server.endpoint is not None:
        return CHAT if server.endpoint.endswith("/chat/completions") else COMPLETIONS
    return COMPLETIONS if data.dataset_name == RANDOM else CHAT


def body(
    backend: str,
    data: Data,
    sampling: Sampling,
    wishes: Wishes,
    diffusion: Diffusion,
    model: str | None = None,
) -> dict[str, Any]:
    """Return what all requests' bodies have in common."""
    others = {"ignore_eos": data.ignore_eos or None, **wishes.typed(backend)}
    typed = typed_request(sampling, diffusion, **others)
    found = _merged(request_options(typed, diffusion.settings or ()), _json(wishes.extra_body))
    for name, flag, said in (
        ("max_tokens", "--output-len", data.output_len),
        ("model", "--model", model),
    ):
        if said is not None and name in found:
            raise ValueError(f"{name} is given twice; leave out {flag}, or say it there only")
    return found


def _merged(body: dict[str, Any], extra: dict[str, Any], place: str = "") -> dict[str, Any]:
    """Return a body with the extra one's options in it; nothing may be said twice."""
    found = dict(body)
    for name, value in extra.items():
        if name in found and isinstance(found[name], dict) and isinstance(value, dict):
            found[name] = _merged(found[name], value, f"{place}{name}.")
        elif name in found:
            raise ValueError(
                f"{place}{name} is given twice; leave it out of --extra-body, or leave out its flag"
            )
        else:
            found[name] = value
    return found


def _wanted(telling: Telling) -> Wanted:
    return Wanted(
        tuple(telling.percentile_metrics.split(",")),
        tuple(numbers(telling.metric_percentiles, "--metric-percentiles", high=100)),
        read_goodput([pair for typed in telling.goodput or [] for pair in typed.split()]),
    )


def _ramp(traffic: Traffic) -> RampUp | None:
    strategy, start, end = (
        traffic.ramp_up_strategy,
        traffic.ramp_up_start_rps,
        traffic.ramp_up_end_rps,
    )
    if strategy is None:
        if start is not None or end is not None:
            raise ValueError("--ramp-up-start-rps and --ramp-up-end-rps need --ramp-up-strategy")
        return None
    if start is None or end is None:
        raise ValueError("--ramp-up-strategy needs --ramp-up-start-rps and --ramp-up-end-rps")
    if traffic.request_rate != "inf":
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
