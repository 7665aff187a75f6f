"""The Ray cluster under `diffray serve`: joined, or started on this machine and watched."""

import contextlib
import logging
import math
import os
import re
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import ray
from ray._private import worker as _ray_worker
from ray._private.ray_constants import PROCESS_TYPE_GCS_SERVER, PROCESS_TYPE_RAYLET
from ray._private.state import actors

from diffray.cluster.control.actors import ANNOUNCED
from diffray.cluster.control.ray_settings import start_ray_here
from diffray.cluster.serve.address import Server
from diffray.cluster.serve.app import with_device
from diffray.cluster.serve.capacity import in_words
from diffray.cluster.serve.config_file import Applications
from diffray.cluster.serve.deployment import resources, threads_of_ranks
from diffray.cluster.serve.supervisor import Ending
from diffray.components.container import usable_cores


@contextlib.contextmanager
def running_ray(
    applications: Applications,
    server: Server,
    ending: Ending,
    checked: Callable[[], None],
) -> Iterator[None]:
    """Connect to the cluster, or start one on this machine and end it afterwards.

    `checked` waits until the models have been checked, too.
    """
    logging.getLogger("ray.serve").setLevel(logging.WARNING)
    quiet: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.WARNING}
    try:
        if server.address is not None:
            ray.init(address=server.address, **quiet)
        else:
            start_ray(applications, include_dashboard=server.dashboard, **quiet)
    except Exception as error:  # Ray raises all kinds of errors
        what = "be started" if server.address is None else f"be reached at {server.address}"
        raise ValueError(f"Ray could not {what}: {' '.join(str(error).split())}") from None
    try:
        checked()
        if server.address is None:
            check_room(applications)
            ending.failure = dead_part_of_ray
        yield
    finally:
        ending.failure = lambda: None  # Ray ends on purpose now
        ray.shutdown()


def start_ray(applications: Applications, **options: Any) -> None:
    """Start Ray with enough CPUs for the maximum number of replicas, and divide the cores."""
    configs = [with_device(each.config) for each in applications.models]
    cpus = sum(resources(each, each.deployment_config.most_replicas)["CPU"] for each in configs)
    # Ray passes it to all its processes; by default it sets a rank's number of CPUs, one.
    if (threads := threads_of_ranks(configs, usable_cores())) is not None:
        os.environ.setdefault("OMP_NUM_THREADS", str(threads))
    start_ray_here(
        num_cpus=max(math.ceil(cpus), os.cpu_count() or 1),
        dashboard_host="127.0.0.1",
        **options,
    )


@contextlib.contextmanager
def reports_printed(say: Callable[[str], None]) -> Iterator[None]:
    """Print what the cluster's processes report to this one as Ray does, with two exceptions.

    diffray's announcements get no prefix, and deaths of ranks and coordinators are left out, as
    announcements report them with their consequences.
    """
    print_as_ray = _ray_worker.print_to_stdstream

    def print_report(data: Any, ignore_prefix: bool) -> None:
        (text,) = data["lines"]
        if text.startswith(ANNOUNCED):
            say(text)
        elif not _is_actor_death(text):
            print_as_ray(data, ignore_prefix)

    _ray_worker.print_to_stdstream = print_report
    try:
        yield
    finally:
        _ray_worker.print_to_stdstream = print_as_ray


def _is_actor_death(text: str) -> bool:
    """Return whether Ray reports the death of a rank or a coordinator."""
    found = re.search(r"Node ID: (\w+) .* Worker PID: (\d+)", text)
    with contextlib.suppress(Exception):  # what Ray raises if its GCS has died, too
        return found is not None and any(
            (actor["Address"]["NodeID"], str(actor["Pid"])) == found.groups()
            and actor["ActorClassName"] in ("Worker", "Coordinator")
            for actor in actors().values()
        )
    return False


def dead_part_of_ray() -> str | None:
    """Return a message if a process that this machine's Ray depends on has died."""
    node: Any = _ray_worker._global_node
    for name, process in node.dead_processes():
        if name in (PROCESS_TYPE_GCS_SERVER, PROCESS_TYPE_RAYLET):
            return (
                f"Ray's {name} has died (exit status {process.returncode}), and with it the "
                f"server; {node.get_logs_dir_path()} may say why"
            )
    return None


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
