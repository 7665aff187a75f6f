"""The Ray clusters with a node on this machine, found by its processes."""

from collections.abc import Iterator
from pathlib import Path

LOOPBACK = "127.0.0.1:"


def clusters() -> Iterator[tuple[str, int]]:
    """Yield each cluster's address, and the user that runs its node."""
    for process in Path("/proc").glob("[0-9]*"):
        try:
            words = (process / "cmdline").read_bytes().decode(errors="replace").split("\0")
            user = process.stat().st_uid
        except OSError:  # it has ended, or belongs to another user
            continue
        if Path(words[0]).name == "raylet":
            for word in words:
                if word.startswith("--gcs-address="):
                    yield word.partition("=")[2], user


def is_alone(address: str) -> bool:
    """Whether this is the Ray of a local `diffray serve`, which is on 127.0.0.1 only."""
    address = address.replace("localhost:", LOOPBACK)
    return address.startswith(LOOPBACK) and address in dict(clusters())
