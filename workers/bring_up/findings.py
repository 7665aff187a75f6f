"""What bring-up found out about the kernels on a GPU, and the file that stores it."""

import fcntl
import os
import re
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from hashlib import sha256
from pathlib import Path
from typing import IO, Final

import torch
from pydantic import Field, ValidationError

from diffray.components.config import Config
from diffray.workers.engine_options import EngineOptions

_LOOK_S: Final = 0.2  # between looks at a lock that another process holds


class Findings(Config):
    """What one check of the kernels found."""

    key: dict[str, str] = Field(default_factory=dict)
    refused: dict[str, str] = Field(default_factory=dict)  # kernels, and why torch's run instead
    graphs: str | None = None  # why steps are not recorded; empty if they are, None: not tried
    late: bool = False  # whether there was no time for graphs
    seconds: float = 0.0
    failed: str = ""  # why only torch's kernels can be used

    def applied_to(self, setup: EngineOptions) -> EngineOptions:
        """Return the options without what was refused as a whole."""
        obstacle = self.failed or self.graphs
        if not obstacle:
            return setup
        if setup.cuda_graphs:
            raise ValueError(f"cuda_graphs cannot be used on this GPU: {obstacle}; leave it out")
        kernels = "torch" if self.failed else setup.kernels
        return setup.model_copy(update={"kernels": kernels, "cuda_graphs": False})

    def lines(self) -> Iterator[str]:
        """Yield a line for each kernel or feature that will not be used."""
        if self.failed:
            yield f"kernels: only torch's are used: {self.failed}"
            return
        for kernel, why in self.refused.items():
            yield f"kernels: torch's {kernel} is used: {why}"
        if self.graphs:
            yield f"cuda_graphs: off: {self.graphs}"

    @property
    def short_of_memory(self) -> bool:
        """Whether a kernel or graphs were refused because the GPU ran out of memory."""
        reasons = *self.refused.values(), self.graphs or ""
        return any(torch.OutOfMemoryError.__name__ in why for why in reasons)


class FindingsFile:
    """Where the findings for one key are kept."""

    def __init__(self, key: dict[str, str], folder: Path | None = None) -> None:
        digest = sha256(repr(sorted(key.items())).encode()).hexdigest()[:16]
        name = re.sub(r"[^a-z0-9]+", "-", key.get("gpu", "").lower()).strip("-")
        self.key = key
        self.path = (folder or cache_folder()) / f"{name}-{digest}.json"

    def read(self) -> Findings | None:
        """Return the findings for this key; None if there are none or they cannot be read."""
        try:
            found = Findings.model_validate_json(self.path.read_bytes())
        except (OSError, ValidationError, ValueError):
            return None
        return found if found.key == self.key else None

    def write(self, found: Findings) -> None:
        """Write the file atomically, because other processes may be reading it."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        number, name = tempfile.mkstemp(dir=self.path.parent, prefix=self.path.name)
        try:
            with os.fdopen(number, "w") as file:
                file.write(found.model_dump_json(indent=1) + "\n")
            os.replace(name, self.path)
        except OSError:
            os.unlink(name)
            raise

    def remove(self) -> None:
        """Remove the file, so that the next start tries again."""
        with suppress(OSError):
            self.path.unlink()

    @contextmanager
    def lock(self, patience_s: float) -> Iterator[None]:
        """Wait while another process tries the same, then make others wait.

        If the folder is not writable, or the wait takes too long, each process tries by itself.
        """
        with ExitStack() as held:
            with suppress(OSError):
                self.path.parent.mkdir(parents=True, exist_ok=True)
                _take(held.enter_context(self.path.with_suffix(".lock").open("w")), patience_s)
            yield


def _take(file: IO[str], patience_s: float) -> None:
    """Lock a file; raise BlockingIOError if another process holds it for longer than this."""
    until = time.monotonic() + patience_s
    while True:
        try:
            return fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > until:
                raise
            time.sleep(_LOOK_S)


def cache_folder() -> Path:
    """Return the folder for findings in the user's cache."""
    try:
        cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    except RuntimeError:  # a user without a home, as in some containers
        cache = Path(tempfile.gettempdir()) / f"cache-of-{os.getuid()}"
    return cache / "diffray/kernels"
