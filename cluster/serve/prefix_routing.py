"""Which replica a request goes to if requests with a common beginning are to meet.

A key stands for a beginning; each replica has a rank for each key, and a request goes to the first
of the ranking that is not too busy. Nothing is remembered, so every process that routes decides
alike, and a replica that comes or goes moves only its own keys. HAProxy does the same by
prefix.lua.
"""

import hashlib
import json
import math
from collections.abc import Mapping
from typing import Final

HEAD: Final = 1024  # characters of a prompt, or of the first message that is not the system's
SLACK: Final = 4  # requests more than the least busy replica has, whatever their number
FACTOR: Final = 1.25  # times the mean
_PROMPTS: Final = ("messages", "input", "prompt")  # where the bodies of the APIs have them
_SYSTEM: Final = ("system", "developer")


def prefix_key(asked: object) -> str | None:
    """Return the key of a body, a prompt or a conversation; None of anything else.

    All turns of a conversation have the same: it is the system's messages and the beginning of the
    first other one. Bodies with another model, adapter or cache_salt have other keys, as they share
    no K/V.
    """
    salt: list[object] = []
    if isinstance(asked, dict):
        salt = [asked.get("model"), asked.get("cache_salt")]
        asked = next((asked[name] for name in _PROMPTS if asked.get(name)), None)
    if not isinstance(asked, str | list) or not asked:
        return None
    begin = _beginning(asked) if isinstance(asked, list) else asked[:HEAD]
    return hashlib.sha1(json.dumps([salt, begin], default=repr).encode()).hexdigest()


def _beginning(asked: list[object]) -> list[object]:
    if not isinstance(asked[0], dict):  # token ids or prompts
        return [json.dumps(asked[:HEAD], default=repr)[:HEAD]]
    begin: list[object] = []
    for message in asked:
        if not isinstance(message, dict) or message.get("role") not in _SYSTEM:
            return [*begin, json.dumps(message, default=repr)[:HEAD]]
        begin.append(message)
    return begin


def choose(key: str, loads: Mapping[str, int]) -> str:
    """Return the replica for a key; `loads` are the requests that each replica has at the moment.

    The least busy replica is always eligible.
    """
    mean = (sum(loads.values()) + 1) / len(loads)
    bound = max(math.ceil(FACTOR * mean), min(loads.values()) + SLACK)
    ranking = sorted(loads, key=lambda name: hashlib.sha1(f"{key}{name}".encode()).digest())
    return next(name for name in ranking if loads[name] < bound)
