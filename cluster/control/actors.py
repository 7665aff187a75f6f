"""What the Ray actors of a replica share: names, forced ends, error texts, announcements."""

import os
import secrets
from contextlib import suppress

import ray
from ray.util.placement_group import PlacementGroup, placement_group_table

from diffray.workers.process import Process, kill

DIED = "died; its node's log may say why (killed, out of memory)"


def actor_name(model: str, group: PlacementGroup, part: str) -> str:
    """Return a unique name that contains the model, the replica and its part.

    Unique, because Ray frees a name only some time after the actor's death.
    """
    # Serve names the group after its replica: SERVE_REPLICA::demo#Replica#x7k2b9qz.
    replica = placement_group_table(group).get("name") or group.id.hex()[:8]
    return f"{short_name(model)} {part} of {replica} ({secrets.token_hex(3)})"


def short_name(model: str) -> str:
    """Return the last part of a model's folder or Hub id."""
    return model.rstrip("/").rpartition("/")[2]


def kill_here(processes: list[Process]) -> None:
    """Kill those of the processes that run on this node: `ray.kill` takes 5 s if one hangs."""
    here = ray.get_runtime_context().get_node_id()
    for process in processes:
        kill(process, here)


def first_line(error: BaseException) -> str:
    """Return a remote error's message as one line, without Ray's traceback before it."""
    cause = getattr(error, "cause", None)
    if isinstance(cause, BaseException):
        text, name = " ".join(str(cause).split()), type(cause).__name__
        if text and type(cause).__module__.startswith("diffray."):
            return text  # already a sentence
        return f"{name}: {text}" if text else name
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1] if lines else type(error).__name__


def announce(model: str, text: str) -> None:
    """Write a line to stderr, which Ray shows on the terminal of `diffray serve`."""
    with suppress(OSError):  # a terminal that was closed
        # Not sys.stderr, which Serve sends to a replica's log.
        os.write(2, f"{short_name(model)}: {text}\n".encode())


def continuing(requests: int) -> str:
    return "1 request continues" if requests == 1 else f"{requests} requests continue"
