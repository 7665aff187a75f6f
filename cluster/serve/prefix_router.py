"""A request router that routes by prefix, for handles and for Serve's own proxy."""

from collections.abc import Iterable
from typing import Any

from ray.serve.config import RequestRouterConfig
from ray.serve.request_router import FIFOMixin, PendingRequest, RequestRouter, RunningReplica

from diffray.cluster.serve.prefix_routing import choose, prefix_key


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
    named = request.metadata.call_method == "ask"  # its first argument is a method's name
    given: Iterable[object] = (*request.args[named : named + 1], *request.kwargs.values())
    return next((key for each in given if (key := prefix_key(each)) is not None), None)
