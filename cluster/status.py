"""What runs on a Ray cluster, and what waits there: `diffray status`."""

import logging
from collections import Counter

import ray
from ray import serve

from diffray.cluster.capacity import ClusterNodes, pending_reasons


def cluster_status(address: str) -> str:
    """Return the state of the cluster's applications, a line each, and of what waits."""
    try:
        ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
    except ConnectionError as error:
        raise ValueError(
            f"no Ray cluster answers at {address!r}; start one with `diffray serve`, or give "
            "--address"
        ) from error
    try:
        return "\n".join([*_applications(), *_waiting()])
    finally:
        ray.shutdown()


def _applications() -> list[str]:
    lines = []
    for name, found in sorted(serve.status().applications.items()):
        lines.append(f"{name}: {found.status.value}" + (f" ({m})" if (m := found.message) else ""))
        for deployment in found.deployments.values():
            states = Counter(deployment.replica_states)
            told = ", ".join(f"{count} {state.lower()}" for state, count in states.items())
            lines.append(f"  replicas: {told or 'none'}")
    return lines or ["no applications"]


def _waiting() -> list[str]:
    return [f"waiting: {reason}" for reason in pending_reasons(ClusterNodes.now())]
