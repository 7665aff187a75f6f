"""A diffusion server's counters in /metrics, before and after a run."""

from collections.abc import Mapping
from typing import Final

import httpx2
from prometheus_client.parser import text_string_to_metric_families

_PREFIXES: Final = ("diffray:", "vllm:")
_STEPS, _POSITIONS, _COMMITTED = (
    f"diffusion_num_{what}_total"
    for what in ("denoising_steps", "canvas_positions", "committed_tokens")
)
# Names in results, and in /metrics; a server may lack some.
_OTHERS: Final = {
    "rounds": "num_rounds_total",
    "preemptions": "num_preemptions_total",
    "prompt_tokens": "prompt_tokens_total",
    "cached_prompt_tokens": "prefix_cache_hits_total",
    "rank_work_seconds": "rank_work_seconds_total",
    "rank_wait_seconds": "rank_wait_seconds_total",
}


def scrape(client: httpx2.Client) -> dict[str, float]:
    """Return the sum of each counter over its labels; empty from a server without metrics."""
    try:
        response = client.get("/metrics")
        return parse(response.text) if response.status_code == 200 else {}
    except (httpx2.HTTPError, ValueError):
        return {}


def parse(text: str) -> dict[str, float]:
    sums: dict[str, float] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            sums[sample.name] = sums.get(sample.name, 0.0) + sample.value
    return sums


def between(
    before: Mapping[str, float], after: Mapping[str, float], seconds: float
) -> dict[str, float]:
    """Return what a server did between two scrapes; empty if it lacks the counters.

    Committed tokens per step are those that one forward of a sequence makes final. vLLM counts one
    more step to commit each canvas; diffray stores a finished block's K/V in the next block's
    first step.
    """
    for prefix in _PREFIXES:
        change = {
            name.removeprefix(prefix): value - before.get(name, 0.0)
            for name, value in after.items()
            if name.startswith(prefix)
        }
        steps, positions, committed = (
            change.get(name, 0.0) for name in (_STEPS, _POSITIONS, _COMMITTED)
        )
        if not (before and steps > 0 and positions > 0 and committed > 0):
            continue
        canvases = committed / (positions / steps)
        if prefix == "vllm:":
            steps -= canvases
        if steps > 0:
            return {
                "diffusion_committed_throughput": committed / seconds,
                "diffusion_steps_per_canvas": steps / canvases,
                "diffusion_committed_per_step": committed / steps,
                "diffusion_committed_tokens": committed,
                "diffusion_denoising_steps": steps,
                "diffusion_canvas_positions": positions,
            } | {name: change[theirs] for name, theirs in _OTHERS.items() if theirs in change}
    return {}
