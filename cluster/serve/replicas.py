"""Collects the metrics of all replicas of this deployment."""

import asyncio
import logging
from typing import Any

from ray import serve
from ray.serve.handle import DeploymentHandle

from diffray.cluster.api.metrics import Snapshot

log = logging.getLogger("ray.serve")

_WITHIN_S = 2.0


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
            async with asyncio.timeout(_WITHIN_S):
                # The first call connects the handle and waits for Serve's controller.
                response = await asyncio.to_thread(self._handle.broadcast, "snapshot")
                # Serve's own gather returns nothing if one answer is missing.
                sent = await response._fetch_replica_results_async()
        except Exception as error:
            log.warning("the other replicas' metrics are not known: %s", error)
            return []
        asked = [asyncio.ensure_future(each.get_async()) for each in sent]
        if not asked:
            return []
        done, late = await asyncio.wait(asked, timeout=_WITHIN_S)
        for each in late:
            each.cancel()
        return [each.result() for each in done if each.exception() is None]
