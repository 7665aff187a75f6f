"""What runs on a Ray cluster, and what waits for resources there: `diffray status`."""

import logging
import os
import pwd
import socket
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator

from diffray.cluster.serve.address import clusters, reachable_url
from diffray.cluster.serve.environment import prepare

ANSWER_S = 60.0  # for a cluster to answer, on a busy machine
_CONNECT_S = 5.0


def cluster_status(address: str) -> str:
    """Return the state of each of the cluster's applications, and pending requests for resources.

    A child process connects, because Ray's core waits and logs for minutes if no cluster answers.
    """
    found = address if address != "auto" else _own_cluster()
    _check_reachable(found)
    prepare(found)
    command = [sys.executable, "-P", "-m", "diffray.cluster.cli.status", found]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=ANSWER_S)
    except subprocess.TimeoutExpired:
        raise ValueError(
            f"what listens at {found} has not answered as a Ray cluster within {ANSWER_S:g} s; "
            "give another --address"
        ) from None
    if "Unauthenticated" in done.stdout + done.stderr:
        raise ValueError(
            f"the Ray cluster at {found} refuses your token (RAY_AUTH_TOKEN or "
            "~/.ray/auth_token); use the token that it was started with, or another --address"
        )
    if done.returncode != 0:
        reason = (done.stderr.strip().splitlines() or ["no reason given"])[-1]
        raise ValueError(f"cannot read the state of the Ray cluster at {found}: {reason}")
    return f"Ray cluster at {found}\n{done.stdout.rstrip()}"


def _own_cluster() -> str:
    """Return RAY_ADDRESS, or the address of this user's only cluster on this machine."""
    if address := os.environ.get("RAY_ADDRESS"):
        return address
    owners = sorted(dict(clusters()).items())
    mine = [address for address, user in owners if user == os.getuid()]
    if len(mine) == 1:
        return mine[0]
    if mine:
        raise ValueError(
            f"{len(mine)} Ray clusters of yours run here ({', '.join(mine)}); give --address"
        )
    others = ", ".join(f"{address} of {_name(user)}" for address, user in owners)
    found = f"others have theirs at {others}" if others else "start one with `diffray serve`"
    raise ValueError(f"you run no Ray cluster on this machine; {found}, or give --address")


def _name(user: int) -> str:
    try:
        return pwd.getpwuid(user).pw_name
    except KeyError:
        return f"user {user}"


def _check_reachable(address: str) -> None:
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if not port.isdecimal():
        raise ValueError(f"expected HOST:PORT of a Ray cluster, or auto (given: {address!r})")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=_CONNECT_S).close()
    except (OSError, OverflowError) as error:
        raise ValueError(
            f"no Ray cluster answers at {address} ({error}); start one with `diffray serve`, or "
            "give another --address"
        ) from None


def _look(address: str) -> Iterator[str]:
    """Connect this process to the cluster, and yield the lines to print."""
    import ray

    from diffray.cluster.serve.capacity import pending_reasons

    ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
    yield from _applications()
    for reason in pending_reasons():
        yield f"waiting: {reason}"


def _applications() -> Iterator[str]:
    import ray
    from ray.serve.context import _get_global_client
    from ray.serve.schema import ApplicationStatus

    client = _get_global_client(raise_if_no_controller_running=False)
    found = client.get_serve_details() if client is not None else {"applications": {}}
    url = reachable_url(found, ray.get_runtime_context().get_node_id())
    for name, each in sorted(found["applications"].items()):
        status, message = ApplicationStatus(each["status"]).value, each["message"]
        prefix = each["route_prefix"]
        where = f" at {url}{prefix.rstrip('/')}/v1" if url and prefix is not None else ""
        yield f"{name}: {status}{where}" + (f" ({message})" if message else "")
        for deployment in each["deployments"].values():
            states = Counter(replica["state"] for replica in deployment["replicas"])
            counts = ", ".join(f"{count} {state.lower()}" for state, count in states.items())
            yield f"  replicas: {counts or 'none'}"
    if not found["applications"]:
        yield "no applications"


if __name__ == "__main__":
    for line in _look(sys.argv[1]):
        print(line)
