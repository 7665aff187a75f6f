"""Chooses replicas so that requests with a common prefix go to the same one.

A key stands for a prefix. Each key ranks the replicas, as in rendezvous hashing, and a request goes
to the first one that is not too busy. The rule has no state, so all routing processes agree, and a
replica that is added or removed moves only its own keys.
"""

import hashlib
import json
import math
from collections.abc import Mapping
from typing import Final

HEAD: Final = 1024  # characters of a prompt, or of the first message after the system messages
SLACK: Final = 4  # requests above the least busy replica's that are allowed, whatever the mean
FACTOR: Final = 1.25  # times the mean load that a replica may have
_PROMPTS: Final = ("messages", "input", "prompt")  # fields of the APIs' bodies
_SYSTEM: Final = ("system", "developer")


def prefix_key(asked: object) -> str | None:
    """Return the key of a body, a prompt or a conversation; None for anything else.

    All turns of a conversation have the same key: it covers the system messages and the start of
    the first other message. Another model, adapter or cache_salt gives another key, because such
    requests share no K/V.
    """
    salt: list[object] = []
    if isinstance(asked, dict):
        salt = [asked.get("model"), asked.get("cache_salt")]
        asked = next((asked[name] for name in _PROMPTS if asked.get(name)), None)
    if not isinstance(asked, str | list) or not asked:
        return None
    start = _start(asked) if isinstance(asked, list) else asked[:HEAD]
    return hashlib.sha1(json.dumps([salt, start], default=repr).encode()).hexdigest()


def _start(asked: list[object]) -> list[object]:
    if not isinstance(asked[0], dict):  # token ids or prompts
        return [json.dumps(asked[:HEAD], default=repr)[:HEAD]]
    start: list[object] = []
    for message in asked:
        if not isinstance(message, dict) or message.get("role") not in _SYSTEM:
            return [*start, json.dumps(message, default=repr)[:HEAD]]
        start.append(message)
    return start


def choose(key: str, loads: Mapping[str, int]) -> str:
    """Return the replica for a key; `loads` maps replicas to their current number of requests.

    The least busy replica is always eligible.
    """
    mean = (sum(loads.values()) + 1) / len(loads)
    bound = max(math.ceil(FACTOR * mean), min(loads.values()) + SLACK)
    ranking = sorted(loads, key=lambda name: hashlib.sha1(f"{key}{name}".encode()).digest())
    return next(name for name in ranking if loads[name] < bound)
