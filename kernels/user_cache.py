"""Where the user's cache is."""

import os
import tempfile
from pathlib import Path


def cache_folder(name: str) -> Path:
    """Return a folder of diffray in the user's cache."""
    try:
        cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    except RuntimeError:  # a user without a home, as in some containers
        cache = Path(tempfile.gettempdir()) / f"cache-of-{os.getuid()}"
    return cache / "diffray" / name
