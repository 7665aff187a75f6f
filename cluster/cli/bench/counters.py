"""What only a diffusion server knows: its counters in /metrics, before and after a run."""

from collections.abc import Mapping
from typing import Final

import httpx2
from prometheus_client.parser import text_string_to_metric_families

_PREFIXES: Final = ("diffray:", "vllm:")
_STEPS, _POSITIONS, _COMMITTED = (
    f"diffusion_num_{what}_total"
    for what in ("denoising_steps", "canvas_positions", "committed_tokens")
)
# Under a name of ours, what the server calls it; a server without it is not asked again.
_OTHERS: Final = {
    "rounds": "num_rounds_total",
    "preemptions": "num_preemptions_total",
    "prompt_tokens": "prompt_tokens_total",
    "cached_prompt_tokens": "prefix_cache_hits_total",
    "rank_work_seconds": "rank_work_seconds_total",
    "rank_wait_seconds": "rank_wait_seconds_total",
}


def scrape(client: httpx2.Client) -> dict[str, float]:
    """Return the sum of each counter over its labels; of a server without metrics, nothing."""
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
    """Return what a server did between two looks; nothing where its metrics do not say.

    Committed per step are the tokens that a sequence's forward makes final. vLLM takes a step more
    to commit each canvas, and counts it; here a finished block's K/V are stored in the next block's
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
        denoising = steps - canvases if prefix == "vllm:" else steps
        if denoising <= 0:
            continue
        others = {name: change[theirs] for name, theirs in _OTHERS.items() if theirs in change}
        return {
            "diffusion_committed_throughput": committed / seconds,
            "diffusion_steps_per_canvas": denoising / canvases,
            "diffusion_committed_per_step": committed / denoising,
            "diffusion_committed_tokens": committed,
            "diffusion_denoising_steps": denoising,
            "diffusion_canvas_positions": positions,
        } | others
    return {}
