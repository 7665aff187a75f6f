"""Publishes a replica's metrics through Ray's exporter, in addition to /metrics."""

import asyncio
import logging
from collections.abc import Awaitable, Callable

from ray.util.metrics import Gauge

from diffray.cluster.api.metrics import Families, Snapshot

log = logging.getLogger("ray.serve")

_EXPORT_S = 5.0  # between exports; Ray drops a gauge that was not set for 20 s


class Exporter:
    """Exports every series with its value in /metrics, under Ray's prefix: `ray_diffray_...`.

    All are gauges in Ray, even counters and buckets: Ray takes a gauge's value unchanged, and drops
    it when its process ends. Prometheus ignores types, so rate() and histogram_quantile() work.
    """

    def __init__(self) -> None:
        self._gauges: dict[str, Gauge] = {}

    def export(self, families: Families) -> None:
        for family in families:
            for sample in family.samples:
                if sample.name.endswith("_created"):
                    continue
                gauge = self._gauges.get(sample.name)
                if gauge is None:
                    name = sample.name.replace(":", "_")
                    gauge = Gauge(name, family.documentation, tag_keys=tuple(sample.labels))
                    self._gauges[sample.name] = gauge
                gauge.set(sample.value, tags=sample.labels)


async def export(snapshot: Callable[[], Awaitable[Snapshot]]) -> None:
    """Export a process's metrics periodically."""
    exporter = Exporter()
    while True:
        try:
            exporter.export((await snapshot()).families)
        except Exception:
            log.exception("the metrics could not be exported to Ray")
        await asyncio.sleep(_EXPORT_S)
