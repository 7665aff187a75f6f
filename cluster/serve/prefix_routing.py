"""Chooses replicas so that requests with a common prefix go to the same one.

A key stands for a prefix. Each key ranks the replicas, as in rendezvous hashing, and a request goes
to the first one that is not too busy. The rule has no state, so all routing processes agree, and a
replica that is added or removed moves only its own keys.
"""

import hashlib
import json
import math
from collections.abc import Iterable, Mapping
from typing import Any, Final

from ray.serve.config import RequestRouterConfig
from ray.serve.request_router import FIFOMixin, PendingRequest, RequestRouter, RunningReplica

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


class PrefixRouter(FIFOMixin, RequestRouter):
    """Sends a call to the replica that holds its prefix, unless that one is too busy.

    The key of a call is its session id, if it has one, or is derived from its arguments. Calls
    without a key go to the least busy replica.
    """

    async def choose_replicas(
        self,
        candidate_replicas: list[RunningReplica],
        pending_request: PendingRequest | None = None,
    ) -> list[list[RunningReplica]]:
        """Return lists of candidates: Serve takes the least busy of the first that accepts."""
        if pending_request is None:
            return [candidate_replicas]
        pending_request.routing_context.should_backoff = True  # before Serve asks again
        key = _key(pending_request)
        if key is None or not candidate_replicas:
            return [candidate_replicas]
        named = {each.replica_id.unique_id: each for each in candidate_replicas}
        queues = self.replica_queue_len_cache
        loads = {name: queues.get(each.replica_id) or 0 for name, each in named.items()}
        chosen = choose(key, loads)
        return [[named.pop(chosen)], [*named.values()]]

    # Private in Ray: the base class drops all but one of several calls for the same request.
    def _get_pending_request_matching_metadata(self, request_metadata: Any = None) -> Any:
        """Give the replica to the call that it was chosen for, not to the first waiting call.

        Of several calls for the same request, which share an id, the first gets it.
        """
        return self._get_pending_request_matching_internal_request_id(request_metadata)


def router_config() -> RequestRouterConfig:
    """Return the configuration of a deployment that uses this router."""
    chosen: Any = PrefixRouter  # Ray's constructor has no types
    return RequestRouterConfig(request_router_class=chosen)


def _key(request: PendingRequest) -> str | None:
    if request.metadata.session_id:
        return str(request.metadata.session_id)
    # The body is the first argument; of "ask" the last, after a method's name and perhaps a path.
    bodies = request.args[-1:] if request.metadata.call_method == "ask" else request.args[:1]
    given: Iterable[object] = (*bodies, *request.kwargs.values())
    return next((key for each in given if (key := prefix_key(each)) is not None), None)
