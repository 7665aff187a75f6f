"""What a replica's actors are called in `ray list actors`."""

import secrets

from ray.util.placement_group import PlacementGroup, placement_group_table


def actor_name(model: str, group: PlacementGroup, part: str) -> str:
    """Return a name that says the model, the replica and the part of it, and is used once.

    Ray frees a name only some time after the actor's death, and a part may be replaced before.
    """
    # Serve calls the group after its replica: SERVE_REPLICA::demo#Replica#x7k2b9qz.
    replica = placement_group_table(group).get("name") or group.id.hex()[:8]
    folder = model.rstrip("/").rpartition("/")[2]
    return f"{folder} {part} of {replica} ({secrets.token_hex(3)})"
