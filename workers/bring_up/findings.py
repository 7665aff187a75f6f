"""What bring-up found out about the kernels on a GPU, and the file that stores it."""

import os
import re
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from hashlib import sha256
from pathlib import Path

import torch
from filelock import FileLock
from pydantic import Field, ValidationError

from diffray.components.config import Config
from diffray.kernels.user_cache import cache_folder
from diffray.workers.engine_options import EngineOptions


class Findings(Config):
    """What one check of the kernels found."""

    key: dict[str, str] = Field(default_factory=dict)
    refused: dict[str, str] = Field(default_factory=dict)  # kernels, and why torch's run instead
    seconds: float = 0.0
    failed: str = ""  # why only torch's kernels can be used

    def applied_to(self, setup: EngineOptions) -> EngineOptions:
        """Return the options without what was refused as a whole."""
        if not self.failed:
            return setup
        if setup.cuda_graphs:
            raise ValueError(f"cuda_graphs cannot be used on this GPU: {self.failed}; leave it out")
        return setup.model_copy(update={"kernels": "torch"})

    def lines(self) -> Iterator[str]:
        """Yield a line for each kernel that will not be used."""
        if self.failed:
            yield f"kernels: only torch's are used: {self.failed}"
            return
        for kernel, why in self.refused.items():
            yield f"kernels: torch's {kernel} is used: {why}"

    @property
    def short_of_memory(self) -> bool:
        """Whether a kernel was refused because the GPU ran out of memory."""
        return any(torch.OutOfMemoryError.__name__ in why for why in self.refused.values())


class FindingsFile:
    """Where the findings for one key are kept."""

    def __init__(self, key: dict[str, str], folder: Path | None = None) -> None:
        digest = sha256(repr(sorted(key.items())).encode()).hexdigest()[:16]
        name = re.sub(r"[^a-z0-9]+", "-", key.get("gpu", "").lower()).strip("-")
        self.key = key
        self.path = (folder or cache_folder("kernels")) / f"{name}-{digest}.json"

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
                held.enter_context(FileLock(self.path.with_suffix(".lock"), timeout=patience_s))
            yield
