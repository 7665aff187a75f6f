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
    reasons = (shortage(list(g["bundles"].values()), g["strategy"], nodes) for g in waiting)
    return [reason for reason in reasons if reason]


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


def shortage(bundles: Sequence[Resources], strategy: str, nodes: ClusterNodes) -> str | None:
    """Return why these bundles do not fit now, or None if they fit."""
    if fits(bundles, strategy, nodes.free):
        return None
    names, count = _names(bundles), len(nodes.total)
    wish = f"a replica needs {in_words(names, bundles)}"
    if fits(bundles, strategy, nodes.total):
        return f"{wish}; the cluster has that, but other work holds it, so this one waits"
    if strategy == "STRICT_PACK":
        # GPUs come first in the names, because the scarcest resource decides which node is largest.
        best = max(nodes.total, key=lambda node: [_of(node, name) for name in names], default={})
        text = f"{wish} on one node, and the largest node has {in_words(names, [best])}"
        if fits(bundles, "PACK", nodes.total):
            return (
                f"{text}; add a larger node, or let the replica span nodes with "
                "placement_group_config: {strategy: PACK}"
            )
        return f"{text}; add a node that is large enough"
    has = f"the cluster has {in_words(names, nodes.total)} on {count} node{'s' * (count != 1)}"
    if strategy == "STRICT_SPREAD" and len(bundles) > count:
        return f"{wish} on {len(bundles)} nodes (STRICT_SPREAD), and {has}; add nodes"
    return f"{wish} ({strategy}), and {has}; add nodes"


def fits(bundles: Sequence[Resources], strategy: str, nodes: Iterable[Resources]) -> bool:
    """Return whether first-fit places the bundles, largest first."""
    rooms = [dict(node) for node in nodes]
    if strategy == "STRICT_PACK":
        whole = {name: sum(_of(b, name) for b in bundles) for name in _names(bundles)}
        return any(_has(room, whole) for room in rooms)
    for bundle in sorted(bundles, key=lambda b: sorted(b.items(), reverse=True), reverse=True):
        room = next((room for room in rooms if _has(room, bundle)), None)
        if room is None:
            return False
        if strategy == "STRICT_SPREAD":
            rooms.remove(room)
        for name, amount in bundle.items():
            room[name] = _of(room, name) - amount
    return True


def _names(bundles: Sequence[Resources]) -> list[str]:
    return sorted({name for bundle in bundles for name in bundle}, key=lambda n: (n != "GPU", n))


def _of(resources: Resources, name: str) -> float:
    return resources.get(name, 0.0)


def _has(room: Resources, bundle: Resources) -> bool:
    return all(_of(room, name) + 1e-6 >= amount for name, amount in bundle.items())


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
