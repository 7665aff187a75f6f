"""What Ray reads from the environment when it is imported: always said, for its defaults vary."""

import os

SETTINGS: dict[str, str] = {
    "RAY_worker_niceness": "0",  # Ray's own is 15, which starves ranks beside other work
    "RAY_AUTH_MODE": "token",  # nobody else on this machine or network may run code here
    "RAY_USAGE_STATS_ENABLED": "0",
}
HAPROXY: dict[str, str] = {
    "RAY_SERVE_ENABLE_HA_PROXY": "1",
    "RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S": "1",
}


def prepare(*, haproxy: bool = False) -> None:
    """Set what the user has not set; to be called before the first import of ray."""
    for name, value in (SETTINGS | (HAPROXY if haproxy else {})).items():
        os.environ.setdefault(name, value)
