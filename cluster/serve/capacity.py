"""Describes the resources that a cluster lacks for waiting replicas."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Resources = Mapping[str, float]

_QUIET_S = 5.0  # before a shortage is reported
_ACCELERATOR = "accelerator_type:"  # Ray marks nodes that have one with a resource of 1


@dataclass(frozen=True, slots=True)
class ClusterNodes:
    """The live nodes: their total and free resources."""

    total: tuple[Resources, ...]
    free: tuple[Resources, ...]

    @staticmethod
    def now() -> "ClusterNodes":
        """Read the state of the connected Ray cluster."""
        import ray
        from ray._private.state import state

        total = {node["NodeID"]: node["Resources"] for node in ray.nodes() if node["Alive"]}
        available = state.available_resources_per_node()
        return ClusterNodes(
            total=tuple(total.values()), free=tuple(available.get(node, {}) for node in total)
        )


def pending_reasons(nodes: ClusterNodes) -> list[str]:
    """Return, for every pending placement group, what it waits for."""
    from ray.util.placement_group import placement_group_table

    groups: dict[str, dict[str, Any]] = placement_group_table()
    waiting = [g for g in groups.values() if g["state"] in ("PENDING", "PREPARED", "RESCHEDULING")]
    return [shortage(list(g["bundles"].values()), g["strategy"], nodes) for g in waiting]


class Shortages:
    """Reports each lasting shortage once."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say
        self._since: dict[str, float] = {}  # when each shortage was first seen
        self._told: set[str] = set()

    def see(self, reasons: list[str], now: float) -> None:
        """Check for shortages; short ones are normal while a replica is being placed."""
        self._since = {reason: self._since.get(reason, now) for reason in reasons}
        for reason, since in self._since.items():
            if now - since >= _QUIET_S and reason not in self._told:
                self._say(f"Waiting: {reason}")
                self._told.add(reason)


def shortage(bundles: Sequence[Resources], strategy: str, nodes: ClusterNodes) -> str:
    """Return what bundles that wait for a place need, and what the cluster has."""
    # GPUs come first: what is scarce decides which node is the largest.
    names = sorted({name for bundle in bundles for name in bundle}, key=lambda n: (n != "GPU", n))
    count = len(nodes.total)
    needs = f"a replica needs {in_words(names, bundles)}"
    has = (
        f"the cluster has {in_words(names, nodes.total)} on {count} node{'s' * (count != 1)}, "
        f"of which {in_words(names, nodes.free)} free"
    )
    if strategy != "STRICT_PACK":
        return f"{needs} ({strategy}), and {has}"
    largest = max(nodes.total, key=lambda node: [_of(node, name) for name in names], default={})
    return f"{needs} on one node; the largest node has {in_words(names, [largest])}, and {has}"


def _of(resources: Resources, name: str) -> float:
    return resources.get(name, 0.0)


def in_words(names: Iterable[str], parts: Sequence[Resources]) -> str:
    """Return some resources as text; of an accelerator type only whether it is there."""
    told = []
    for name in names:
        amount = sum(_of(part, name) for part in parts)
        if name.startswith(_ACCELERATOR):
            told.append(f"{'' if amount else 'no '}{name.removeprefix(_ACCELERATOR)}")
        else:
            told.append(f"{amount:g} {name}")
    return ", ".join(told)
