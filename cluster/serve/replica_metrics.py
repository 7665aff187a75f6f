"""The metrics of replicas beside their own /metrics: in Ray's exporter, and of all replicas."""

import asyncio
import logging
from typing import Any

from ray import serve
from ray.serve.handle import DeploymentHandle
from ray.util.metrics import Gauge

from diffray.cluster.api.metrics import Families, Snapshot

log = logging.getLogger("ray.serve")

EXPORT_S = 5.0  # between exports; Ray drops a gauge that was not set for 20 s
_ANSWER_S = 2.0  # for other replicas


class Exporter:
    """Exports every series with its value in /metrics, under Ray's prefix: `ray_diffray_...`.

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


class Replicas:
    """All replicas of this process's deployment."""

    def __init__(self) -> None:
        context = serve.get_replica_context()
        self.own = context.replica_id.unique_id
        self._handle: Any = DeploymentHandle(context.deployment, context.app_name)

    async def snapshots(self) -> list[Snapshot]:
        """Return the metrics of the replicas that answer in time.

        One that does not is left out, so its series have a gap: its last values may be lower than
        those that another replica has shown since, and a counter must not decrease.
        """
        try:
            async with asyncio.timeout(_ANSWER_S):
                # The first call connects the handle and waits for Serve's controller.
                response = await asyncio.to_thread(self._handle.broadcast, "snapshot")
                # Serve's own gather returns nothing if one answer is missing.
                sent = await response._fetch_replica_results_async()
        except Exception as error:
            log.warning("the other replicas' metrics are not known: %s", error)
            return []
        answers = [asyncio.ensure_future(each.get_async()) for each in sent]
        if not answers:
            return []
        done, late = await asyncio.wait(answers, timeout=_ANSWER_S)
        for each in late:
            each.cancel()
        return [each.result() for each in done if each.exception() is None]
