"""The Ray cluster under `diffray serve`: joined, or started here and watched; what it lacks."""

import contextlib
import logging
import math
import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

import ray
from ray.serve.context import _get_global_client
from ray.util.placement_group import placement_group_table

from diffray.cluster.control.ray_settings import start_ray_here
from diffray.cluster.serve.address import Server
from diffray.cluster.serve.app import with_device
from diffray.cluster.serve.config_file import Applications
from diffray.cluster.serve.deployment import resources, threads_of_ranks
from diffray.cluster.serve.supervisor import Ending
from diffray.components.container import usable_cores
from diffray.workers.process import children, is_running

Resources = Mapping[str, float]

_NORMAL_S = 5.0  # seconds that a replica may wait for its placement without a report
_ACCELERATOR = "accelerator_type:"  # the prefix of the resource by which Ray marks nodes


class ClusterNodes(NamedTuple):
    """The live nodes' resources."""

    total: tuple[Resources, ...]
    free: Resources  # of all nodes together


def pending_reasons() -> list[str]:
    """Return what each pending placement group of the connected cluster waits for."""
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


_PARTS: Final = ("gcs_server", "raylet")  # without them the server cannot go on


@contextlib.contextmanager
def running_ray(
    applications: Applications,
    server: Server,
    ending: Ending,
    checked: Callable[[], None],
) -> Iterator[Any]:
    """Connect to the cluster, or start one on this machine and end it afterwards.

    `checked` waits until the models have been checked, too.
    """
    logging.getLogger("ray.serve").setLevel(logging.WARNING)
    try:
        if server.address is not None:
            context: Any = ray.init(address=server.address, logging_level=logging.WARNING)
        else:
            context = start_ray(applications, include_dashboard=server.dashboard)
    except Exception as error:  # Ray raises all kinds of errors
        what = "be started" if server.address is None else f"be reached at {server.address}"
        raise ValueError(f"Ray could not {what}: {' '.join(str(error).split())}") from None
    try:
        checked()
        if server.address is None:
            check_room(applications)
            ending.failure = watch_ray(context.address_info["session_dir"])
        yield context
    finally:
        ending.failure = lambda: None  # Ray ends on purpose now
        ray.shutdown()


def start_ray(applications: Applications, **options: Any) -> Any:
    """Start Ray with enough CPUs for the maximum number of replicas, and divide the cores."""
    configs = [with_device(each.config) for each in applications.models]
    cpus = sum(resources(each, each.deployment_config.most_replicas)["CPU"] for each in configs)
    # Ray passes it to all its processes; by default it sets a rank's number of CPUs, one.
    if (threads := threads_of_ranks(configs, usable_cores())) is not None:
        os.environ.setdefault("OMP_NUM_THREADS", str(threads))
    return start_ray_here(
        num_cpus=max(math.ceil(cpus), os.cpu_count() or 1),
        dashboard_host="127.0.0.1",
        logging_level=logging.WARNING,
        **options,
    )


def watch_ray(session: str) -> Callable[[], str | None]:
    """Return a function that says which part of this process's Ray has died, if one has."""
    found = {}
    for pid in children():
        with contextlib.suppress(OSError):
            command = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")[0]
            found[pid] = Path(command.decode()).name

    def dead() -> str | None:
        for pid, name in found.items():
            if name in _PARTS and not is_running(pid):
                return f"Ray's {name} has died, and with it the server; {session}/logs may say why"
        return None

    return dead


def check_room(applications: Applications) -> None:
    """Raise ValueError if this machine lacks resources, as no other node joins its Ray."""
    needed = Counter[str]()
    for each in applications.models:
        needed += resources(with_device(each.config), each.config.deployment_config.first_replicas)
    have = ray.cluster_resources()
    for name, amount in needed.items():
        if amount > have.get(name, 0) + 1e-6:
            raise ValueError(
                f"the replicas need {in_words([name], [needed])}, and this machine has "
                f"{in_words([name], [have])}; give --device cpu, fewer replicas or ranks, or the "
                "--address of a Ray cluster that has more"
            )


def serve_details() -> dict[str, Any]:
    """Return the details of the connected cluster's Serve; empty if it has none.

    Private in Ray: its public status lacks the address and the paths, and its REST API needs the
    dashboard, which is off by default here.
    """
    client = _get_global_client(raise_if_no_controller_running=False)
    return dict(client.get_serve_details()) if client is not None else {}
