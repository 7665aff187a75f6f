"""What Ray's processes read from the environment: set before ray is first imported."""

import os
from collections.abc import Mapping
from typing import Final

SETTINGS: Final = {
    "RAY_worker_niceness": "0",  # Ray's default is 15, which starves ranks next to other work
    "RAY_AUTH_MODE": "token",  # so that no other user or machine can run code here
    "RAY_USAGE_STATS_ENABLED": "0",
}
# A single machine: all of Ray's own ports are on 127.0.0.1.
ALONE: Final = {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}


def set_defaults(settings: Mapping[str, str]) -> None:
    """Set what the user has not set."""
    for name, value in settings.items():
        os.environ.setdefault(name, value)
