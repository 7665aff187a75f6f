"""A replica's metrics through Ray's own exporter, under Ray's prefix: `ray_diffray_...`."""

from ray.util.metrics import Gauge

from diffray.cluster.api.metrics import Families

PERIOD_S = 5.0  # Ray drops a gauge that was not set for 20 s


class Exporter:
    """Exports every series with its value in /metrics.

    All are gauges in Ray, also counters and buckets: Ray takes a gauge's value unchanged, and drops
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
