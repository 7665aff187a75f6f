"""A diffusion server's own counters, read from /metrics before and after a run."""

from dataclasses import dataclass
from typing import Final

import httpx2
from prometheus_client.parser import text_string_to_metric_families

_OURS, _VLLMS = "diffray:", "vllm:"
_STEPS: Final = "diffusion_num_denoising_steps_total"
_POSITIONS: Final = "diffusion_num_canvas_positions_total"
_COMMITTED: Final = "diffusion_num_committed_tokens_total"
_WORK, _WAIT = "rank_work_seconds_total", "rank_wait_seconds_total"


@dataclass(frozen=True, slots=True)
class RankSeconds:
    """What rank 0 did while there was work."""

    work: float  # in rounds
    wait: float  # for the next one


@dataclass(frozen=True, slots=True)
class Counters:
    """Sums since the server began; `commits` says whether a finished canvas takes a step more.

    It does in vLLM, whose count of steps includes these; here a finished block's K/V are stored in
    the next block's first step.
    """

    steps: float
    positions: float
    committed: float
    commits: bool
    rank: RankSeconds


@dataclass(frozen=True, slots=True)
class Diffusion:
    """What vLLM's benchmark tells of a diffusion model, by its formulas."""

    committed_throughput: float
    steps_per_canvas: float
    committed_per_step: float
    committed_tokens: int
    denoising_steps: int
    canvas_positions: int

    @property
    def canvas(self) -> float:
        """Positions of a canvas (a block)."""
        return self.committed_tokens * self.steps_per_canvas / self.denoising_steps


def parse(text: str) -> Counters | None:
    """Return the counters in a server's metrics; None where it has none of them."""
    sums: dict[str, float] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            sums[sample.name] = sums.get(sample.name, 0.0) + sample.value
    for prefix in (_OURS, _VLLMS):
        if prefix + _STEPS in sums:
            return Counters(
                sums[prefix + _STEPS],
                sums.get(prefix + _POSITIONS, 0.0),
                sums.get(prefix + _COMMITTED, 0.0),
                commits=prefix == _VLLMS,
                rank=RankSeconds(sums.get(prefix + _WORK, 0.0), sums.get(prefix + _WAIT, 0.0)),
            )
    return None


async def scrape(client: httpx2.AsyncClient) -> Counters | None:
    """Read the server's counters; None where it has no metrics, or none of diffusion."""
    try:
        response = await client.get("/metrics")
        return parse(response.text) if response.status_code == 200 else None
    except (httpx2.HTTPError, ValueError):
        return None


def between(before: Counters | None, after: Counters | None, seconds: float) -> Diffusion | None:
    """Return what happened between two looks; None where that is unknown, or nothing did."""
    if before is None or after is None:
        return None
    steps, positions = after.steps - before.steps, after.positions - before.positions
    committed = after.committed - before.committed
    if steps <= 0 or positions <= 0 or committed <= 0:
        return None
    canvases = committed / (positions / steps)
    denoising = steps - canvases if after.commits else steps
    if denoising <= 0:
        return None
    return Diffusion(
        committed_throughput=committed / seconds,
        steps_per_canvas=denoising / canvases,
        committed_per_step=committed / denoising,
        committed_tokens=int(committed),
        denoising_steps=int(denoising),
        canvas_positions=int(positions),
    )


def rank_seconds(before: Counters | None, after: Counters | None) -> RankSeconds | None:
    """Return rank 0's time between two looks; None where the server does not measure it."""
    if before is None or after is None or after.rank.work <= before.rank.work:
        return None
    return RankSeconds(after.rank.work - before.rank.work, after.rank.wait - before.rank.wait)
