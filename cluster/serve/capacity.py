"""Reports the resources that waiting replicas need and those that the cluster has."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

Resources = Mapping[str, float]

_NORMAL_S = 5.0  # seconds that a replica may wait for its placement without a report
_ACCELERATOR = "accelerator_type:"  # the prefix of the resource by which Ray marks nodes


class ClusterNodes(NamedTuple):
    """The live nodes' resources."""

    total: tuple[Resources, ...]
    free: Resources  # of all nodes together


def pending_reasons() -> list[str]:
    """Return what each pending placement group of the connected cluster waits for."""
    import ray
    from ray.util.placement_group import placement_group_table

    groups = placement_group_table().values()
    waiting = [g for g in groups if g["state"] in ("PENDING", "PREPARED", "RESCHEDULING")]
    total = tuple(node["Resources"] for node in ray.nodes() if node["Alive"])
    nodes = ClusterNodes(total, ray.available_resources())
    return [shortage(list(g["bundles"].values()), g["strategy"], nodes) for g in waiting]


class Shortages:
    """Reports each lasting shortage once."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say
        self._since: dict[str, float] = {}  # when each shortage was first seen
        self._said: set[str] = set()

    def see(self, reasons: list[str], now: float) -> None:
        self._since = {reason: self._since.get(reason, now) for reason in reasons}
        for reason, since in self._since.items():
            if now - since >= _NORMAL_S and reason not in self._said:
                self._say(f"Waiting: {reason}")
                self._said.add(reason)


def shortage(bundles: Sequence[Resources], strategy: str, nodes: ClusterNodes) -> str:
    """Return what the bundles of a waiting replica need, and what the cluster has."""
    # GPUs come first: the scarcest resource decides which node is the largest.
    names = sorted({name for bundle in bundles for name in bundle}, key=lambda n: (n != "GPU", n))
    count = len(nodes.total)
    needs = f"a replica needs {in_words(names, bundles)}"
    has = (
        f"the cluster has {in_words(names, nodes.total)} on {count} node{'s' * (count != 1)}, "
        f"of which {in_words(names, [nodes.free])} free"
    )
    if strategy != "STRICT_PACK":
        return f"{needs} ({strategy}), and {has}"
    largest = max(nodes.total, key=lambda node: [node.get(n, 0.0) for n in names], default={})
    return f"{needs} on one node; the largest node has {in_words(names, [largest])}, and {has}"


def in_words(names: Iterable[str], parts: Sequence[Resources]) -> str:
    """Return resources as text; for an accelerator type, only whether there is one."""
    words = []
    for name in names:
        amount = sum(part.get(name, 0.0) for part in parts)
        if name.startswith(_ACCELERATOR):
            words.append(f"{'' if amount else 'no '}{name.removeprefix(_ACCELERATOR)}")
        else:
            words.append(f"{amount:g} {name}")
    return ", ".join(words)
