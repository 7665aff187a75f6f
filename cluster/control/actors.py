"""What the Ray actors of a replica share: names, forced ends and error texts."""

import secrets

import ray
from ray.util.placement_group import PlacementGroup, placement_group_table

from diffray.workers.process import Place, kill


def actor_name(model: str, group: PlacementGroup, part: str) -> str:
    """Return a unique name that contains the model, the replica and the part of it.

    Unique, because Ray frees a name only some time after the actor's death.
    """
    # Serve names the group after its replica: SERVE_REPLICA::demo#Replica#x7k2b9qz.
    replica = placement_group_table(group).get("name") or group.id.hex()[:8]
    return f"{short_name(model)} {part} of {replica} ({secrets.token_hex(3)})"


def short_name(model: str) -> str:
    """Return the last part of a model's folder or Hub id."""
    return model.rstrip("/").rpartition("/")[2]


def kill_here(places: list[Place]) -> None:
    """Kill those of the processes that run on this node: `ray.kill` takes 5 s if one hangs."""
    here = ray.get_runtime_context().get_node_id()
    for place in places:
        kill(place, here)


def first_line(error: BaseException) -> str:
    """Return a remote error's message as one line, without Ray's traceback before it."""
    cause = getattr(error, "cause", None)
    if isinstance(cause, BaseException):
        text, name = " ".join(str(cause).split()), type(cause).__name__
        if text and type(cause).__module__.startswith("diffray."):
            return text  # a sentence by itself
        return f"{name}: {text}" if text else name
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1] if lines else type(error).__name__
