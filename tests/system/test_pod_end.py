"""A Kubernetes pod that terminates: `ray start --block` gets SIGTERM while clients wait.

Ray drains the node before it ends, so the pods of `k8s/` have no `preStop`.
"""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import ray

from benchmarks.local_ray import MEMORY, local_cluster
from diffray.cluster.serve.server import remove
from tests.helpers.nodes import (
    alive,
    application,
    ask,
    clients,
    seconds_until,
    serving,
    start,
    states,
)
from tests.helpers.served import text_of

pytestmark = pytest.mark.long

DRAINS = 60  # seconds, at most; k8s/ has more


@contextmanager
def pod() -> Iterator[subprocess.Popen[bytes]]:
    """Start a node with two CPUs as KubeRay does, in a process that stays until it is ended."""
    address = ray.get_runtime_context().gcs_address
    command = [
        str(Path(sys.executable).with_name("ray")), "start", "--block", f"--address={address}",
        "--num-cpus=2", f"--object-store-memory={MEMORY}", "--dashboard-agent-listen-port=0",
    ]  # fmt: skip
    settings = {"RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S": str(DRAINS)}
    nodes = len(ray.nodes())
    process = subprocess.Popen(command, env=os.environ | settings, start_new_session=True)
    try:
        seconds_until(lambda: len(ray.nodes()) > nodes, 60)
        yield process
    finally:
        process.terminate()
        process.wait(DRAINS + 30)


def test_answers_finish_and_a_replica_starts_elsewhere() -> None:
    with local_cluster([{"num_cpus": 0}]), serving() as url:
        wanted = application(
            "pods",
            engine_kwargs={"dtype": "float64", "max_num_seqs": 4},
            deployment_config={"graceful_shutdown_timeout_s": DRAINS / 2},
        )
        long: dict[str, Any] = {"max_tokens": 256, "ignore_eos": True}
        with pod() as first:
            start(wanted)
            (node,) = alive("Worker").values()
            with pod():
                with clients(4, lambda: text_of(ask(url, "pods", **long))) as answers:

                    def wait_for_more() -> None:
                        before = len(answers)
                        seconds_until(lambda: len(answers) > before + 4, 60)

                    wait_for_more()
                    begin = time.monotonic()
                    first.send_signal(signal.SIGTERM)
                    first.wait(DRAINS + 30)
                    took = time.monotonic() - begin
                    seconds_until(lambda: states("pods") == {"RUNNING": 1}, 60)
                    wait_for_more()
                    assert set(alive("Worker").values()).isdisjoint({node})
                remove(wanted)
    print(f"the pod ended after {took:.1f} s; {len(answers)} answers")
    assert len(set(answers)) == 1
    assert took < DRAINS, "Ray gave up waiting for the node"
