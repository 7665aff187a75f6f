"""What Ray Serve tells about itself: where it listens, and all applications with their paths."""

from typing import Any

from ray.serve.context import _get_global_client


def serve_details() -> dict[str, Any]:
    """Return the details of the connected cluster's Serve; empty if it has none.

    Private in Ray: its public status lacks the address and the paths, and its REST API needs the
    dashboard, which is off by default here.
    """
    client = _get_global_client(raise_if_no_controller_running=False)
    return dict(client.get_serve_details()) if client is not None else {}
